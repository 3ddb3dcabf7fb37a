"""Every way of holding a matrix against F.linear, which weights each way takes, and a row's bits in any company."""

import pytest
import torch

from paceline.kernels.primitives.linear import pack_linear
from paceline.kernels.primitives.table import Place
from tests.fakes.random_model import BF16, CPU, F32

SHAPES = [(96, 64), (33, 40), (200, 576)]
ON_AVX2 = torch.backends.quantized.engine in ("fbgemm", "x86")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("place", "tolerance"), [(F32, 2e-6), (BF16, 2e-6)])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 65])
def test_a_packed_matrix_multiplies_like_f_linear(
    shape: tuple[int, int], with_bias: bool, place: Place, tolerance: float, num_rows: int
) -> None:
    """Tolerance relative to the sum of magnitudes: the weights are bfloat16 numbers, which half precision holds exactly."""
    weight = (torch.randn(shape) / shape[1] ** 0.5).bfloat16().float()
    bias = torch.randn(shape[0]).bfloat16().float() if with_bias else None
    x = torch.randn(num_rows, shape[1])
    packed = pack_linear(weight, bias, place)
    got = packed.module(x)
    magnitude = torch.nn.functional.linear(x.abs(), weight.abs(), None if bias is None else bias.abs())
    assert got.dtype is torch.float32
    assert ((got - torch.nn.functional.linear(x, weight, bias)).abs() <= tolerance * magnitude).all()
    assert packed.weight_bytes == weight.numel() * place.dtype.itemsize


def test_float32_goes_to_onednn_and_bfloat16_to_fbgemm() -> None:
    weight = torch.randn(8, 8)
    assert pack_linear(weight, None, F32).name == "onednn_f32"
    assert pack_linear(weight, None, BF16).name == ("fbgemm_fp16" if ON_AVX2 else "plain")


@pytest.mark.parametrize("value", [70000.0, float("inf"), float("nan")])
def test_a_weight_beyond_half_precision_is_not_given_to_fbgemm(value: float) -> None:
    weight = torch.ones(8, 8)
    weight[3, 4] = value
    packed = pack_linear(weight, None, BF16)
    assert packed.name == "plain"
    assert packed.reason.startswith("not fbgemm_fp16: ")
    assert not ON_AVX2 or "does not fit half precision" in packed.reason
    got = packed.module(torch.ones(1, 8))[0]
    expected = weight.bfloat16().float().sum(1).bfloat16().float()
    assert torch.equal(got.nan_to_num(-1), expected.nan_to_num(-1))


def test_the_largest_half_still_goes_to_fbgemm() -> None:
    packed = pack_linear(torch.full((8, 8), 65504.0), None, BF16)
    assert packed.name == ("fbgemm_fp16" if ON_AVX2 else "plain")
    assert ("half precision" in packed.reason) is False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_devices_take_the_plain_way(dtype: torch.dtype) -> None:
    packed = pack_linear(torch.ones(4, 4, device="meta"), None, Place(torch.device("meta"), dtype))
    assert packed.name == "plain"
    assert "runs on the CPU, not on meta" in packed.reason


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_float32_rows_have_the_same_bits_in_any_company(shape: tuple[int, int], num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    linear = pack_linear(torch.randn(shape), None, Place(CPU, torch.float32)).module
    x = torch.randn(130, shape[1])
    alone = torch.cat([linear(x[i : i + 1]) for i in range(len(x))])
    for num_rows in (2, 3, 4, 5, 7, 8, 9, 31, 64, 100, 130):
        start = 130 - num_rows
        assert torch.equal(linear(x[start:].contiguous()), alone[start:]), f"{num_rows} rows"
