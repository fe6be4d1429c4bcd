"""A plugin for vLLM's server: weights come from a file, where NCCL would bring them."""

import os
from pathlib import Path
from time import sleep

import torch


def read(file):
    """The weights in a file, once it is there; removes it."""
    while not file.exists():
        sleep(0.01)
    weights = torch.load(file)
    file.unlink()
    return weights


def register():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    class FileEngine(NCCLWeightTransferEngine):
        def init_transfer_engine(self, init_info):
            assert (init_info.rank_offset, init_info.world_size) == (1, 2)

        def update_weights(self, update_info):
            info = self.parse_update_info(update_info)
            weights = read(Path(os.environ["WEIGHTS_FILE"]))
            for name, dtype, shape in zip(info.names, info.dtype_names, info.shapes, strict=True):
                assert weights[name].dtype == getattr(torch, dtype)
                assert [*weights[name].shape] == shape
            self.model.load_weights((name, weights[name]) for name in info.names)

        def finish_weight_update(self):
            super().finish_weight_update()
            # vLLM's build for CPUs would go on with its packed copy of tied embeddings
            dispatch_cpu_unquantized_gemm(self.model.lm_head, remove_weight=False)

    WeightTransferEngineFactory.register_engine("file", FileEngine)
