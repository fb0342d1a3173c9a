"""transformers: importing this module registers the experts implementation "moe_cpu".

    import moe_cpu.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="moe_cpu")

A loaded model is switched by ``model.set_experts_implementation("moe_cpu")``. bf16 experts with silu, gelu, gelu tanh, gpt-oss's clamped GLU or an ungated
relu2 run on the kernels, however their weights are stored; every other layer, float32 models included, and every call that wants a gradient run on a plain
loop over the module's own operations, with one warning per class. `explain` lists which is which, `pack` packs ahead of the first token.
"""

from __future__ import annotations

from transformers.integrations.moe import ExpertsInterface

from moe_cpu.integrations.transformers.detect import Plan, plan_of
from moe_cpu.integrations.transformers.forward import NAME, experts_forward, reference_forward
from moe_cpu.integrations.transformers.packing import LayerReport, PackReport, explain, pack, unpack

ExpertsInterface.register(NAME, experts_forward)

__all__ = [
    "NAME",
    "LayerReport",
    "PackReport",
    "Plan",
    "experts_forward",
    "explain",
    "pack",
    "plan_of",
    "reference_forward",
    "unpack",
]
