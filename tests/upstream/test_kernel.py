"""Which code calls mlx-lm's attention kernel, and so can be given another one."""

import pytest
from mlx_lm.models import deepseek_v32, llama

from mlx_sinks.upstream.kernel import calls_kernel


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (deepseek_v32.DeepseekV32Attention.__call__, True),
        (llama.Attention.__call__, True),
        (llama.nn.RMSNorm.__call__, False),
        (deepseek_v32.Indexer.__call__, False),
        (len, False),
    ],
)
def test_functions_that_call_the_kernel(function, calls):
    assert calls_kernel(function) == calls
