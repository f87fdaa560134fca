"""Short scripts that run on a CPU; the README shows them."""
