"""Try the recipe for TorchRec's ``examples/golden_training/train_dlrm.py``, which is not part of its package.

``python -m tests.trainers.golden_training PATH`` changes a copy of that file as docs/guides/trainers.md says. It runs
this on two ranks, kills it, runs it again, and compares losses and weights with those of a run without a kill.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/guides/trainers.md"
NUM_STEPS, KILLED_AFTER = 20, 13
# What the page leaves out: sizes for a laptop, the same random numbers in each run, and what is compared.
_TRAIN = f"""    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    train(num_embeddings=1000, embedding_dim=16, num_iterations={NUM_STEPS})
"""
_TOLD = """        weights = sum(float(weight.detach().double().sum()) for weight in model.parameters())
        print(f"rank {rank} step {step} loss {loss[0].item()!r} weights {weights!r}", flush=True)
        if os.path.exists("kill") and step == STEP:
            os._exit(9)
""".replace("STEP", str(KILLED_AFTER))


def recipe() -> str:
    """Return the lines that the page has for the end of ``train``."""
    (lines,) = re.findall(
        r"```text\n(    loader = cnr\.ReaderState\(_get_random_dataset.*?)```", PAGE.read_text(), re.DOTALL
    )
    return str(lines)


def changed(source: str) -> str:
    """Return the file as the page changes it, for this test."""
    lines = recipe()
    call = "        manager.async_save(step, state)\n"
    assert call in lines
    before, _, rest = source.partition("    # train model\n")
    _, _, after = rest.partition('\n\nif __name__ == "__main__":')
    assert after
    assert "    train()\n" in before
    before = before.replace("    train()\n", _TRAIN).replace("from tqdm import tqdm\n", "import torchrec_cnr as cnr\n")
    few = lines.replace("every_steps=100", "every_steps=5").replace(call, call + _TOLD)
    return f'{before}{few}\n\nif __name__ == "__main__":{after}'


def run(folder: Path) -> set[str]:
    """Run the file in a folder on two ranks, and return what it told of each step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "../train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return set(re.findall(r"rank \d step \d+ loss [-.e\d]+ weights [-.e\d]+", done.stdout))  # lines of ranks may join


def main(source: Path) -> None:
    """Run it whole, then killed and again, and compare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(changed(source.read_text()))
        (folder / "whole").mkdir()
        (folder / "killed").mkdir()
        whole = run(folder / "whole")
        (folder / "killed" / "kill").touch()
        killed = run(folder / "killed")
        (folder / "killed" / "kill").unlink()
        resumed = run(folder / "killed")
    assert len(whole) == 2 * NUM_STEPS, whole
    assert killed < whole
    assert 0 < len(resumed) < len(whole)
    assert resumed < whole, resumed - whole
    assert killed | resumed == whole
    print(
        f"killed after step {KILLED_AFTER}, resumed: {len(resumed) // 2} steps repeated or new, all as without a kill"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
