"""Try the recipe for TorchRec's ``examples/golden_training/train_dlrm.py``, which is not part of its package.

``python -m tests.trainers.golden_training PATH`` changes a copy of that file as docs/guides/trainers.md says.
"""

import re
import sys
import tempfile
from pathlib import Path

from tests.trainers.killed_recipe import PAGE, compare, replaced, told

# What the page leaves out: sizes for a laptop, the same random numbers in each run, and what is compared.
_TRAIN = """    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    train(num_embeddings=1000, embedding_dim=16, num_iterations=20)
"""


def changed(source: str) -> str:
    """Return the file as the page changes it, for this test."""
    (lines,) = re.findall(
        r"```text\n(    loader = cnr\.ReaderState\(_get_random_dataset.*?)```", PAGE.read_text(), re.DOTALL
    )
    lines = replaced(lines, "every_steps=100", "every_steps=5")
    call = "        manager.async_save(step, state)\n"
    lines = replaced(lines, call, call + told("rank", "step", "loss[0]", "model", killed_after=13, indent=8))
    before, _, rest = source.partition("    # train model\n")
    before = replaced(before, "    train()\n", _TRAIN)
    before = replaced(before, "from tqdm import tqdm\n", "import torchrec_cnr as cnr\n")
    _, _, after = rest.partition('\n\nif __name__ == "__main__":')
    assert after
    return f'{before}{lines}\n\nif __name__ == "__main__":{after}'


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "train.py").write_text(changed(Path(sys.argv[1]).read_text()))
        compare(Path(name), "train.py")
