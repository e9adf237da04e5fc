"""What ranks of one host say to each other: latency and bandwidth of collectives, by every way there is."""
