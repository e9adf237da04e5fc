"""Models as the Open Inference Protocol (KServe v2) knows them, and folders of them as Triton has: `config.pbtxt`."""
