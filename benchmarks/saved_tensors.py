"""What torch.compile keeps of a block for its backward pass, from its graphs, without a GPU.

    export TRITON_INTERPRET=1
    python -m benchmarks.saved_tensors configs/softmax.toml configs/lssar.toml --budget 1 0.99

Traces blocks of the config in bfloat16 with the operators of a GPU, as AOTAutograd and its
partitioner do for torch.compile, and adds up what the forward graph returns for the backward one.
Weights and RoPE's tables are left out. A view counts as the whole tensor that it keeps alive, and
that once.
"""

import torch
import torch._functorch.config as functorch_config
from functorch.compile import aot_function, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._inductor.decomposition import select_decomp_table

import model
from attention import ChosenEngine, load_engine
from config import load_config
from infra.cli import ArgumentParser, run_main
from measure import format_table
from positions import rotate_pairs
from schema import Config, Engine


class Traced(Exception):
    """The graphs are there, nothing need run."""


class Stack(nn.Module):
    """Blocks of the config, with the engines of a GPU."""

    def __init__(self, config: Config, n_blocks: int) -> None:
        super().__init__()
        blocks = [model.Block(config.layer_configs[0], i) for i in range(n_blocks)]
        self.layers = [block.attention.normaliser for block in blocks]
        for block, layer in zip(blocks, self.layers, strict=True):
            name: Engine = (
                "sdpa" if layer.definition.form == "softmax" and not layer.reweight_p else "triton"
            )
            block.attention.engine = ChosenEngine(name, load_engine(name).run, name)
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, cos, sin)
        return x


def block_bytes(config: Config, budget: float) -> float:
    """What a block adds for one sequence: half of the difference of three and one."""
    return (saved_bytes(config, budget, 3) - saved_bytes(config, budget, 1)) / 2


def saved_bytes(config: Config, budget: float, n_blocks: int) -> int:
    """Of one sequence: the activations that the forward graph of the blocks returns beside its
    output.
    """
    stack = Stack(config, n_blocks)
    parameters = dict(stack.named_parameters())
    m = config.model
    x = torch.empty(1, config.train.seq_len, m.n_embd, requires_grad=True)
    tables = [torch.empty(config.train.seq_len, m.head_dim // 2) for _ in range(2)]
    total = 0

    def forward(x: Tensor, cos: Tensor, sin: Tensor, power: Tensor, *weights: Tensor) -> Tensor:
        for layer in stack.layers:
            layer.p = power  # an input of the graph, as all tensors are
        with torch.autocast("cpu", torch.bfloat16):
            return torch.func.functional_call(
                stack, dict(zip(parameters, weights, strict=True)), (x, cos, sin)
            )

    def add_up(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> nn.Module:
        nonlocal total
        # x is the first
        left_out = [node.name for node in graph.graph.find_nodes(op="placeholder")][1:]
        returned = graph.graph.find_nodes(op="output")[0].args[0]
        kept = [node for node in returned[1:] if node and node.name not in left_out]
        values = [node.meta["val"] for node in kept]
        activations = [
            v for v in values if isinstance(v, Tensor) and config.train.seq_len in v.shape
        ]
        storages = [v.untyped_storage() for v in activations]
        total = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
        raise Traced

    traced = aot_function(
        forward,
        add_up,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    try:
        with functorch_config.patch(activation_memory_budget=budget):
            power = torch.tensor(config.attention.reweight_p)
            traced(x, *tables, power, *parameters.values())
    except Traced:
        return total
    raise AssertionError("not traced")


def main() -> None:
    parser = ArgumentParser(__doc__)
    parser.add_argument("configs", nargs="+", help="config files")
    parser.add_argument(
        "--budget",
        type=float,
        nargs="+",
        default=[1.0],
        help="activation_memory_budget (default: 1)",
    )
    args, overrides = parser.parse_known_args()
    if not all(0 <= budget <= 1 for budget in args.budget):
        parser.error(f"--budget {args.budget}: expected shares from 0 to 1")
    model.apply_rope = rotate_pairs  # as on a GPU
    lines = [["config", "sequences", *(f"MB, budget {budget:g}" for budget in args.budget)]]
    for path in args.configs:
        config = load_config(path, overrides)
        sizes = [
            block_bytes(config, budget) * config.train.micro_batch / 1e6 for budget in args.budget
        ]
        lines.append(
            [config.name, str(config.train.micro_batch), *(f"{size:.0f}" for size in sizes)]
        )
    print(format_table(lines))


if __name__ == "__main__":
    run_main(main)
