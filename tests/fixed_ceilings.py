"""Made-up ceilings. With them, tests do not depend on the machine and take no time to measure it."""

from linformer_cli.bench.measure.ceilings import Ceilings, CeilingsReport, CopyCeiling, ProductCeiling


class FixedCeilings(Ceilings):
    """Ceilings of 100 GFLOP/s in float32, 200 GFLOP/s in bfloat16, and 10 GB/s.

    `asked` lists rows and precision of all requested products.
    """

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device)
        self.asked: list[tuple[int, str]] = []
        self._found: dict[tuple[int, str], ProductCeiling] = {}

    def product(self, shapes, rows, precision):
        self.asked.append((rows, precision))
        flops = sum(2 * rows * inputs * outputs for inputs, outputs in shapes)
        speed = {"fp32": 100.0, "bf16": 200.0}[precision]
        found = ProductCeiling(len(shapes), rows, precision, speed, flops, (1.0,))
        return self._found.setdefault((flops, precision), found)

    @property
    def copy(self) -> CopyCeiling:
        return CopyCeiling(10.0, 1, (1.0,))

    def describe(self) -> CeilingsReport:
        return CeilingsReport(self.copy, list(self._found.values()))
