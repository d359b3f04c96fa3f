"""Try the recipe for ``torchrec_dlrm/dlrm_main.py`` of https://github.com/facebookresearch/dlrm.

``python -m tests.trainers.dlrm_main PATH`` changes a copy of that folder as docs/guides/trainers.md says. It needs the
package ``iopath``, as dlrm_main.py does.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from tests.trainers.killed_recipe import PAGE, compare, replaced, told

NUM_SAMPLES, NUM_IDS, BATCH = 640, 100, 16
OPTIONS = f"""--in_memory_binary_criteo_path ../data --dataset_name criteo_kaggle --epochs 2 --batch_size {BATCH}
--adagrad --embedding_dim 8 --num_embeddings {NUM_IDS} --dense_arch_layer_sizes 16,8 --over_arch_layer_sizes 16,1
--seed 3 --learning_rate 0.1 --lr_warmup_steps 8 --lr_decay_start 10 --lr_decay_steps 20 --limit_val_batches 2
--limit_test_batches 2"""


def changed(source: str) -> str:
    """Return dlrm_main.py as the page changes it, for this test."""
    page = PAGE.read_text()
    (main,) = re.findall(r"```text\n(    global manager, state\n.*?)```", page, re.DOTALL)
    (step,) = re.findall(r"```text\n( +lr_scheduler\.step\(\)\n.*?)```", page, re.DOTALL)
    main = replaced(main, "every_steps=100", "every_steps=5")
    source = replaced(source, "    for epoch in range(args.epochs):\n", main)
    source = replaced(source, "    test_auroc = _evaluate(", "    manager.close()\n    test_auroc = _evaluate(")
    steps = "lr_scheduler.last_epoch"
    step += told("dist.get_rank()", steps, "loss", "pipeline._model", killed_after=13, indent=16)
    source = replaced(source, "                lr_scheduler.step()\n", step)
    call = "pipeline.progress(batched_iterator)\n"
    source = replaced(source, call, f"loss, *_ = {call}")
    source = replaced(source, "\nimport torch\n", "\nimport torch\nimport torchrec_cnr as cnr\n")
    seed = 'torch.manual_seed(int(os.environ["LOCAL_RANK"]))'
    return replaced(source, "    args = parse_args(argv)\n", f"    args = parse_args(argv)\n    {seed}\n")


def write_clicks(folder: Path) -> None:
    """Write random clicks, as files of the Criteo Kaggle data set."""
    generator = np.random.default_rng(0)
    np.save(folder / "train_dense.npy", generator.random((NUM_SAMPLES, 13), dtype=np.float32))
    np.save(folder / "train_sparse.npy", generator.integers(0, NUM_IDS, (NUM_SAMPLES, 26), dtype=np.int32))
    np.save(folder / "train_labels.npy", generator.integers(0, 2, (NUM_SAMPLES, 1), dtype=np.int32))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(sys.argv[1], folder / "code")
        program = folder / "code" / "dlrm_main.py"
        program.write_text(changed(program.read_text()))
        (folder / "data").mkdir()
        write_clicks(folder / "data")
        compare(folder, "code/dlrm_main.py", OPTIONS.split(), [folder / "code", *map(Path, sys.path)])
