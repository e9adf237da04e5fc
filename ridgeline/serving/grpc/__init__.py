"""The folder that gRPC's clients import from, `proto`. The services are in serving/apis/grpc."""
