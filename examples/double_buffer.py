"""One model, independent inputs: submit the next one before reading the last.

Read after each call and the device idles while the host prepares; keep one call in flight and the
two overlap. The results are the same.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable

import torch

import neuron_streams

REQUESTS, SIZE, LAYERS = 24, 512, 8


def network(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    for _ in range(LAYERS):
        x = torch.tanh(x @ weight)
    return x


def prepare(request: int) -> torch.Tensor:
    """What a host does before each call, in plain Python: here it makes up numbers."""
    values = [((request * 31 + i) % 17) / 17.0 for i in range(8 * SIZE)]
    return torch.tensor(values).reshape(8, SIZE)


def sequential(model: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    return [model(prepare(request)).cpu() for request in range(REQUESTS)]


def double_buffered(model: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    in_flight: deque[torch.Tensor] = deque()
    results = []
    for request in range(REQUESTS):
        in_flight.append(model(prepare(request)))
        if len(in_flight) == 2:
            results.append(in_flight.popleft().cpu())
    return results + [output.cpu() for output in in_flight]


def milliseconds(run: Callable[[], Iterable[torch.Tensor]]) -> tuple[float, list[torch.Tensor]]:
    start = time.perf_counter()
    results = list(run())
    return (time.perf_counter() - start) * 1e3, results


def main() -> None:
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0)) / SIZE**0.5
    compiled = neuron_streams.compile(network, (prepare(0), weight), name="network")
    there = weight.to("neuron")

    def model(x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = compiled(x, there)
        return output

    sequential(model)  # warm
    one_by_one, expected = milliseconds(lambda: sequential(model))
    overlapped, results = milliseconds(lambda: double_buffered(model))
    torch.testing.assert_close(results, expected, rtol=0, atol=0)
    print(f"sequential      {one_by_one:7.1f} ms for {REQUESTS} requests")
    print(f"double-buffered {overlapped:7.1f} ms, the same results")


if __name__ == "__main__":
    main()
