"""Export an encoder block and compile it ahead of time, without its copies."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F

import qkvpass


class Block(torch.nn.Module):
    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous()
            for t in self.qkv(x).chunk(3, dim=-1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))


if __name__ == "__main__":
    block, x = Block().eval(), torch.randn(2, 50, 64)
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder, qkvpass.capture() as reports:
        package = torch._inductor.aoti_compile_and_package(
            torch.export.export(block, (x,)),
            package_path=str(Path(folder) / "block.pt2"),
            inductor_configs=qkvpass.inductor_options(),
        )
        compiled = torch._inductor.aoti_load_package(package)
        torch.testing.assert_close(compiled(x), block(x))
    print(*reports, sep="\n")
    assert sum(len(report.removed) for report in reports) == 4
