"""torchtitan's debug model of Llama 3 with FSDP2, on the CPU. `--plain` is under torchrun.

torchtitan takes CUDA where there is no accelerator: a stand-in of its device module has the names
that it reads. Data are numbers of a generator, attention is torch's own.
"""

import argparse
import hashlib
import json
import os
import signal
import types
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.tools import utils

utils.device_type, utils.device_module = (
    "cpu",
    types.SimpleNamespace(
        set_device=lambda _: None,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=lambda: None,
        get_device_name=lambda _: "cpu",
        get_device_properties=lambda _: types.SimpleNamespace(total_memory=1 << 30),
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
        memory_stats=lambda _: {},
    ),
)

if not hasattr(torch.distributed, "set_timeout"):  # before torch 2.14
    torch.distributed.set_timeout = lambda *_: None

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import ParallelAwareDataloader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--plain", action="store_true")
parser.add_argument("--steps", type=int, default=8)
parser.add_argument("--die", nargs="*", default=[])  # RANK:PLACE:STEP
options = parser.parse_args()
options.out.mkdir(parents=True, exist_ok=True)


def die(place, step):
    rank = torch.distributed.get_rank()
    if f"{rank}:{place}:{step}" in options.die:
        try:
            (options.out / f"{rank}:{place}:{step}").touch(exist_ok=False)
        except FileExistsError:
            return
        os.kill(os.getpid(), signal.SIGKILL)


class Tokens(torch.utils.data.IterableDataset):
    def __init__(self, rank, length):
        self.rank, self.length, self.position = rank, length, 0

    def __iter__(self):
        while True:
            generator = torch.Generator().manual_seed(1000 * self.rank + self.position)
            tokens = torch.randint(0, 2048, (self.length + 1,), generator=generator)
            self.position += 1
            yield {"input": tokens[:-1]}, tokens[1:]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class TokenLoader(ParallelAwareDataloader):
    from dataclasses import dataclass

    @dataclass(kw_only=True, slots=True)
    class Config(ParallelAwareDataloader.Config):
        pass

    def __init__(self, config, *, dp_world_size, dp_rank, seq_len, local_batch_size, **_):
        super().__init__(
            Tokens(dp_rank, seq_len), dp_rank, dp_world_size, batch_size=local_batch_size
        )


class Words(BaseTokenizer):
    from dataclasses import dataclass

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config, **_):
        super().__init__()

    def encode(self, *_, **__):
        return []

    def decode(self, *_, **__):
        return ""

    def get_vocab_size(self):
        return 2048


lines = []


class Metrics(MetricsProcessor):
    from dataclasses import dataclass

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        lines.append([step, global_avg_loss, global_max_loss, grad_norm, extra_metrics])
        die("logged", step)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)


def make_config():
    spec = model_registry("debugmodel")
    spec.model.layers = spec.model.layers[:2]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=2048),
        model_spec=spec,
        dump_folder=str(options.out / "dump"),
        tokenizer=Words.Config(),
        dataloader=TokenLoader.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8),
        training=TrainingConfig(
            local_batch_size=2,
            seq_len=64,
            steps=options.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        metrics=Metrics.Config(log_freq=2, disable_color_printing=True),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),  # torch 2.13 has no other
        checkpoint=CheckpointManager.Config(enable=True, interval=4, last_save_model_only=False),
    )


def main():
    config = make_config()
    config.debug.seed = 3
    config.debug.enable_structured_logging = False
    if options.plain:
        trainer = config.build()
    else:
        from outlast.integrations.torchtitan_trainer import OutlastTitanTrainer

        trainer = OutlastTitanTrainer(config)
    for part in trainer.model_parts[0].modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    forward = trainer.fwd_bwd_fn

    def dying(*args):
        die("forward", trainer.step)
        loss = forward(*args)
        die("backward", trainer.step)
        return loss

    trainer.fwd_bwd_fn = dying
    trainer.train()
    digest = hashlib.sha256()
    for name, value in sorted(trainer.model_parts[0].named_parameters()):
        digest.update(name.encode() + value.detach().to_local().numpy().tobytes())
    rank = torch.distributed.get_rank()
    (options.out / f"{rank}.json").write_text(
        json.dumps(
            {
                "weights": digest.hexdigest(),
                "steps": trainer.step,
                "tokens": trainer.ntokens_seen,
                "lines": lines,
                "rates": trainer.lr_schedulers.get_metrics(),
                "saved": sorted(path.name for path in (options.out / "dump/checkpoint").iterdir()),
            }
        )
    )
    trainer.close()


main()
