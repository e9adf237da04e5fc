"""The server: one engine's process and API servers' processes around it (docs/serving.md).

From top to bottom: processes/, then http/ and grpc/, requests/, api_server.py, observed/, generation/, grammars/.
"""
