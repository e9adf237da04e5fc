"""A server of MCP with more tools than a client shows its model at once."""

from __future__ import annotations

import json
import sys

SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
TOOLS = [{"name": f"tool_{n}", "description": f"Does the work {n}.", "inputSchema": SCHEMA} for n in range(120)]

for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    result: dict[str, object] = {}
    if asked["method"] == "initialize":
        version = asked["params"]["protocolVersion"]
        info = {"name": "many", "version": "1"}
        result = {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    elif asked["method"] == "tools/list":
        result = {"tools": TOOLS}
    elif asked["method"] == "tools/call":
        result = {"content": [{"type": "text", "text": f"{asked['params']['name']} was called"}]}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
