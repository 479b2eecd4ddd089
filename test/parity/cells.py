"""The matrix: which cells there are, and the plan by which the Python and the C++ ranks run them.

A mode is a set of settings. Both sides know the settings (python_ranks.py, cells.cpp) and refuse an
unknown one; a new mode made of known settings is one line here.

    find_unused_parameters, gradient_as_bucket_view, static_graph, bucket_cap_mb   DDP's options
    spare        the model's layer `spare` exists, and is used: never, or by some ranks in some steps
    accumulate   micro-batches a step; all but the last under no_sync()
    set_to_none  0: zero_grad() fills the gradients with zeros
    momentum     the optimizer's
    weight_decay the optimizer's; it tells a gradient of zeros from none, which leaves a parameter alone
    hook         the communication hook (HOOKS in python_ranks.py, make_hook in parity_ranks.cpp)
    low_rank     PowerSGD's rank; it starts with the third step
    warm_start   PowerSGD's
    averaging    post-local SGD: parameters are averaged every that many steps, once it has started
    subgroups    post-local SGD's gradients are averaged within pairs of ranks (0: not at all)
    evaluate     after each step a forward in eval() mode without gradients, by which Python broadcasts buffers
    python_compatible  ours follows Python in that; mixed jobs always do
    join         the ranks have inputs for different numbers of steps (steps_of); averages divide by the
                 number of ranks at the start (initial), or of those that still have inputs (active)
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
    "static_graph": {"static_graph": "1", "bucket_cap_mb": "0.002"},
    "static_graph_unused": {"static_graph": "1", "spare": "never", "weight_decay": "0.01"},
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
    "evaluate": {"evaluate": "1", "python_compatible": "1"},
    "join": {"join": "initial", "bucket_cap_mb": "0.002"},
    "join_active": {"join": "active", "bucket_cap_mb": "0.002"},
}

# What a model has in every mode. No optimizer adds a decay to a sparse gradient. Of half-precision tensors
# LibTorch's mul_(number), which scales the momentum, rounds the number first, and Python's does not.
MODEL_SETTINGS = {"sparse": {"weight_decay": "0"}, "mixed_dtypes": {"momentum": "0"}}

# Of the jobs of Python's and C++ ranks.
MIXED_MODES = ("default", "accumulate", "tiny_buckets", "find_unused", "find_unused_some_ranks", "bucket_view",
               "static_graph", "evaluate", "fp16", "power_sgd")

# Cells that prove nothing or cannot be run: the model, the modes and the reason.
SEVERAL_STEPS = ("power_sgd", "power_sgd_rank_4", "power_sgd_cold_start", "fp16_power_sgd", "quantized",
                 "quantized_channels")
DOES_NOT_APPLY = (
    ("mixed_dtypes", SEVERAL_STEPS, "a bucket for each dtype, and Python's hooks of several steps race where there are "
                                    "several (KeyError, closed connections, hangs)"),
    ("sparse", ("fp16", "fp16_wrapper", "fp16_find_unused", "fp16_power_sgd"),
     'Python: "cadd_sparse" not implemented for \'Half\''),
    ("sparse", ("power_sgd", "power_sgd_rank_4", "power_sgd_cold_start"),
     "the sparse gradient has a bucket of its own, and Python's hooks of several steps race where there are several"),
    ("sparse", ("quantized",), "Python: Could not run 'aten::aminmax' with arguments from the 'SparseCPU' backend"),
    ("sparse", ("quantized_channels",),
     "Python: Could not run 'aten::fill_.Scalar' with arguments from the 'SparseCPU' backend"),
    ("sparse", ("join", "join_active"),
     "Python: Expected a proper Tensor but got None: a rank without inputs has no sparse gradient"),
    ("complex", ("power_sgd", "power_sgd_rank_4", "power_sgd_cold_start", "fp16_power_sgd"),
     "Python's ranks differ among themselves"),
    ("complex", ("bf16_wrapper",),
     "Python: view_as_complex is only supported for half, float and double tensors, but got BFloat16"),
)

# Their buckets that are not full come in the order of a hash map in Python.
SEVERAL_KINDS_OF_BUCKETS = ("sparse", "mixed_dtypes")

# Cells within their bounds that are not bit-equal at 2 ranks either: here ours does not compress.
NOT_TO_THE_BIT = ("complex.fp16_wrapper",)

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
        return {"momentum": "0.9", **MODES[self.mode], **MODEL_SETTINGS.get(self.model, {})}

    @property
    def reason_against(self):
        """Why the cell is not run, or None."""
        return next((reason for model, modes, reason in DOES_NOT_APPLY if model == self.model and self.mode in modes),
                    None)

    @property
    def micro_batches(self):
        return int(self.settings.get("accumulate", "1"))

    @property
    def bound(self):
        """Of the largest parameter."""
        return 1e-3 if self.settings.get("hook") in LOSSY_HOOKS else 1e-6

    def layout(self, buckets):
        """What must be the same of the buckets' sizes."""
        return sorted(buckets) if self.model in SEVERAL_KINDS_OF_BUCKETS else buckets

    def is_exact(self, world_size):
        """Whether both sides are bit-equal: the order of additions does not matter with two summands."""
        return world_size == 2 and self.name not in NOT_TO_THE_BIT

    def makes_ranks_equal(self, label):
        """Whether all ranks that made this step ("end": the last one) have the same parameters after it."""
        averaging = int(self.settings.get("averaging", "0"))
        if not averaging:
            return True
        step = -1 if label == "end" else int(label)
        return 0 <= step < LOCAL_START or step > 0 and (step - LOCAL_START) % averaging == 0


class Plan(NamedTuple):
    steps: int
    learning_rate: float
    python_compatible: bool  # some ranks of the job are Python's
    cells: list

    def write(self, path):
        """As the C++ ranks read it (cells.h)."""
        with open(path, "w", encoding="ascii") as file:
            print(f"steps={self.steps} learning_rate={self.learning_rate} "
                  f"python_compatible={int(self.python_compatible)}", file=file)
            for cell in self.cells:
                settings = {"model": cell.model, **cell.settings}
                print(cell.name, *(f"{key}={value}" for key, value in settings.items()), file=file)


def steps_of(join, steps, rank, world_size):
    """For how many steps a rank has inputs: with `join`, all for the last rank only, and one for rank 1 of
    several (it is gone when the buckets are laid out anew)."""
    if join is None or rank == world_size - 1:
        return steps
    return 1 if rank == 1 else max(1, steps - 4 * (rank + 1))


def spare_is_used(setting, rank, step):
    """Every fifth step no rank uses the layer; otherwise the even ranks and the odd ones in turn."""
    return setting == "some_ranks" and step % 5 != 4 and (rank + step) % 2 == 0
