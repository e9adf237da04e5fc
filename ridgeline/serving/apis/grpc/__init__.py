"""The server's gRPC side, with the same requests as REST: a service of our own and the Open Inference Protocol (KServe
v2)."""
