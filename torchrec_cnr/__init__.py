"""Incremental, quantized checkpoints of TorchRec models, through the stock ``torch.distributed.checkpoint``.

The public names and their modules stand in ``__init__.pyi``. Each is imported when it is first asked for: reading
checkpoints needs no TorchRec, and the command line shows its help without torch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
