"""What the loop in train.py calls: rollouts, sampler, model, batching and the files of a run."""

import logging

# transformers imports torchao wherever it is installed, which warns about kernels for other GPUs
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
