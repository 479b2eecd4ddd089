"""The matrix: which cells there are, and the plan by which the Python and the C++ ranks run them.

A mode is a set of settings. Both sides know the settings (python_ranks.py, cells.cpp) and refuse an
unknown one; a new mode made of known settings is one line here.

    find_unused_parameters, gradient_as_bucket_view, bucket_cap_mb   DDP's options
    spare        the model's layer `spare` exists, and is used: never, or by some ranks in some steps
    accumulate   micro-batches a step; all but the last under no_sync()
    set_to_none  0: zero_grad() fills the gradients with zeros
    weight_decay the optimizer's; it tells a gradient of zeros from none, which leaves a parameter alone
    hook         the communication hook (HOOKS in python_ranks.py, make_hook in parity_ranks.cpp)
    low_rank     PowerSGD's rank; it starts with the third step
    warm_start   PowerSGD's
    averaging    post-local SGD: parameters are averaged every that many steps, once it has started
    subgroups    post-local SGD's gradients are averaged within pairs of ranks (0: not at all)
"""

from typing import NamedTuple

MODES = {
    "default": {},
    "find_unused": {"find_unused_parameters": "1", "spare": "never", "weight_decay": "0.01"},
    "find_unused_some_ranks": {"find_unused_parameters": "1", "spare": "some_ranks", "bucket_cap_mb": "0.002",
                               "weight_decay": "0.01"},
    "bucket_view": {"gradient_as_bucket_view": "1"},
    "no_bucket_view": {"gradient_as_bucket_view": "0"},
    "accumulate": {"accumulate": "4"},
    "tiny_buckets": {"bucket_cap_mb": "0.002"},
    "zeroed_gradients": {"set_to_none": "0", "bucket_cap_mb": "0.002"},
    "zeroed_bucket_view": {"set_to_none": "0", "gradient_as_bucket_view": "1"},
    "allreduce_hook": {"hook": "allreduce", "bucket_cap_mb": "0.002"},
    "fp16": {"hook": "fp16_compress", "bucket_cap_mb": "0.002"},
    "bf16": {"hook": "bf16_compress", "bucket_cap_mb": "0.002"},
    "fp16_find_unused": {"hook": "fp16_compress", "find_unused_parameters": "1", "spare": "some_ranks",
                         "accumulate": "2"},
    "fp16_wrapper": {"hook": "fp16_compress_wrapper", "bucket_cap_mb": "0.002"},
    "bf16_wrapper": {"hook": "bf16_compress_wrapper", "bucket_cap_mb": "0.002"},
    # The hooks below communicate in several steps. Python chains these as callbacks, which race where there
    # are several buckets: over Gloo its ranks then add up different things, or hang. So one bucket.
    "power_sgd": {"hook": "power_sgd", "low_rank": "1"},
    "power_sgd_rank_4": {"hook": "power_sgd", "low_rank": "4"},
    "power_sgd_cold_start": {"hook": "power_sgd", "low_rank": "2", "warm_start": "0"},
    "fp16_power_sgd": {"hook": "fp16_power_sgd", "low_rank": "2"},
    "quantized": {"hook": "quantization_per_tensor"},
    "quantized_channels": {"hook": "quantization_per_channel"},
    "post_local_sgd": {"hook": "post_local_sgd", "averaging": "4", "subgroups": "1"},
    "local_sgd": {"hook": "post_local_sgd", "averaging": "3", "subgroups": "0"},
}

# Hooks that lose something: 1e-3 in place of 1e-6 of the largest parameter.
LOSSY_HOOKS = ("fp16_compress", "bf16_compress", "fp16_compress_wrapper", "bf16_compress_wrapper", "power_sgd",
               "fp16_power_sgd", "quantization_per_tensor", "quantization_per_channel")
# Post-local SGD starts after that many steps; then ranks are equal after an averaging only.
LOCAL_START = 3


class Cell(NamedTuple):
    model: str
    mode: str

    @property
    def name(self):
        return f"{self.model}.{self.mode}"

    @property
    def settings(self):
        return MODES[self.mode]

    @property
    def micro_batches(self):
        return int(self.settings.get("accumulate", "1"))

    @property
    def bound(self):
        """Of the largest parameter."""
        return 1e-3 if self.settings.get("hook") in LOSSY_HOOKS else 1e-6

    def makes_ranks_equal(self, step):
        """Whether all ranks have the same parameters after this step."""
        averaging = int(self.settings.get("averaging", "0"))
        return not averaging or step < LOCAL_START or (step - LOCAL_START) % averaging == 0


class Plan(NamedTuple):
    steps: int
    learning_rate: float
    momentum: float
    cells: list

    def write(self, path):
        """As the C++ ranks read it (cells.h)."""
        with open(path, "w", encoding="ascii") as file:
            print(f"steps={self.steps} learning_rate={self.learning_rate} momentum={self.momentum}", file=file)
            for cell in self.cells:
                settings = {"model": cell.model, **cell.settings}
                print(cell.name, *(f"{key}={value}" for key, value in settings.items()), file=file)


def spare_is_used(setting, rank, step):
    """Every fifth step no rank uses the layer; otherwise the even ranks and the odd ones in turn."""
    return setting == "some_ranks" and step % 5 != 4 and (rank + step) % 2 == 0
