// A small agent made with the official TypeScript SDK: `node agent.mjs`. A prompt that begins with "Count" runs until it
// is cancelled; any other prompt is repeated.
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk";

const { agent: calls, client: questions } = acp.methods;
const running = new Map();
let opened = 0;

function say(client, sessionId, text) {
  const content = { type: "text", text };
  return client.notify(questions.session.update, { sessionId, update: { sessionUpdate: "agent_message_chunk", content } });
}

acp
  .agent({ name: "counter" })
  .onRequest(calls.initialize, () => ({
    protocolVersion: acp.PROTOCOL_VERSION,
    agentInfo: { name: "counter", version: "1" },
    agentCapabilities: {},
  }))
  .onRequest(calls.session.new, () => ({ sessionId: `session-${++opened}` }))
  .onRequest(calls.session.prompt, async ({ params, client }) => {
    const [{ text }] = params.prompt;
    if (!text.startsWith("Count")) {
      await say(client, params.sessionId, text);
      return { stopReason: "end_turn" };
    }
    const cancelled = new Promise((resolve) => running.set(params.sessionId, resolve));
    await say(client, params.sessionId, "one");
    await cancelled;
    return { stopReason: "cancelled" };
  })
  .onNotification(calls.session.cancel, ({ params }) => running.get(params.sessionId)?.())
  .connect(acp.ndJsonStream(Writable.toWeb(process.stdout), Readable.toWeb(process.stdin)));
