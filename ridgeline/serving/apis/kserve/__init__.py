"""The Open Inference Protocol (KServe v2): its requests, and its routes over HTTP."""
