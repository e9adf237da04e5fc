"""The same requests as REST, over gRPC: a service of our own, and the Open Inference Protocol (KServe v2)."""
