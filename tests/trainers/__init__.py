"""The callbacks for PyTorch Lightning and TorchTNT that a page of the documentation gives."""
