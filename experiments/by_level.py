"""A BabyAI run in blocks of steps, success by level: `python experiments/by_level.py runs/NAME [10]`."""

import json, sys, glob, collections
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
from worlds.babyai import LEVELS


def main(run, block=10):
    rows = [json.loads(l) for l in open(run + "/metrics.jsonl")]
    files = sorted(glob.glob(run + "/trajectories/*.jsonl"))
    for a in range(0, len(rows), block):
        c = collections.defaultdict(list)
        for f in files[a : a + block]:
            for l in open(f):
                t = json.loads(l)
                c[LEVELS[int(t["item"].split("_")[1]) % 40]].append(t["success"])
        r = rows[a : a + block]
        m = lambda k: sum(x[k] for x in r) / len(r)
        print(
            f"{a:4d} h{r[-1]['horizon']} suc {m('success'):.3f} ent {m('entropy'):.2f} val {m('valid_actions'):.3f} turns {m('turns'):.1f} gn {m('grad_norm'):.2f} cf {m('clip_fraction'):.3f} s {m('seconds_rollout'):.1f}+{m('seconds_update'):.1f} | "
            + " ".join(f"{k[:14]} {sum(v) / len(v):.2f}" for k, v in sorted(c.items()))
        )


main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 10)
