"""The command that the MCP conformance suite runs: `python errand.py PORT URL` makes mcp_client.py run a scenario."""

import json
import os
import socket
import sys

port, url = sys.argv[1:]
scenario, context = os.environ["MCP_CONFORMANCE_SCENARIO"], os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}")
with socket.create_connection(("127.0.0.1", int(port))) as client, client.makefile("rw") as stream:
    print(json.dumps({"url": url, "scenario": scenario, "context": json.loads(context)}), file=stream, flush=True)
    print(stream.read())
