"""The server: one engine's process and API servers' processes around it (docs/serving.md).

From above to below: processes/, then http/ and grpc/, requests/, api_server.py, observed/, generation/, grammars/.
"""
