"""Talk between the ranks of one host: latency and bandwidth of collectives, by every way there is."""
