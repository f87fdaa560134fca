"""Copy and compute on two streams, ordered by events, and checked.

While the device multiplies one block, the next one is already on its way: the compute stream waits
for the event of its own block only, the host for nothing until the end.
"""

import torch

import neuron_streams

BLOCKS, SIZE = 4, 256


def main() -> None:
    weight = torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    blocks = [torch.full((SIZE, SIZE), float(i)) for i in range(BLOCKS)]
    multiply = neuron_streams.compile(torch.matmul, (blocks[0], weight), name="multiply")

    copies, compute = neuron_streams.Stream(), neuron_streams.Stream()
    weight_there = weight.to("neuron", non_blocking=True)
    results = []
    for block in blocks:
        with neuron_streams.stream(copies):
            block_there = torch.empty(SIZE, SIZE, device="neuron")
            block_there.copy_(block, non_blocking=True)
            arrived = copies.record_event()
        with neuron_streams.stream(compute):
            compute.wait_event(arrived)
            product = multiply(block_there, weight_there)
            results.append(product.to("cpu", non_blocking=True))
    done = compute.record_event()
    print(f"{BLOCKS} blocks submitted, {done}")

    done.synchronize()
    for block, result in zip(blocks, results, strict=True):
        torch.testing.assert_close(result, block @ weight)
    print(f"{BLOCKS} products as on the host, {done}")


if __name__ == "__main__":
    main()
