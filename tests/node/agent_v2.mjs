// A small agent of ACP version 2, a draft, made with the official TypeScript SDK: `node agent_v2.mjs`. A prompt that
// begins with "Count" runs until it is cancelled; any other prompt is repeated.
import { randomUUID } from "node:crypto";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk/experimental/v2";

const { agent: calls, client: questions } = acp.methods;
const sessions = new Map();
const running = new Map();

function tell(client, sessionId, update) {
  return client.notify(questions.session.update, { sessionId, update });
}

function end(client, sessionId, stopReason) {
  running.delete(sessionId);
  return tell(client, sessionId, { sessionUpdate: "state_update", state: "idle", stopReason });
}

async function turn(client, sessionId, messageId, content) {
  const shown = sessions.get(sessionId).messages;
  shown.push({ sessionUpdate: "user_message", messageId, content });
  await tell(client, sessionId, shown.at(-1));
  await tell(client, sessionId, { sessionUpdate: "state_update", state: "running" });
  shown.push({ sessionUpdate: "agent_message", messageId: randomUUID(), content: [content[0]] });
  await tell(client, sessionId, shown.at(-1));
  if (!content[0].text.startsWith("Count")) return end(client, sessionId, "end_turn");
  running.set(sessionId, () => end(client, sessionId, "cancelled"));
}

acp
  .agent({ name: "counter" })
  .onRequest(calls.initialize, () => ({
    protocolVersion: acp.PROTOCOL_VERSION,
    info: { name: "counter", version: "2" },
    capabilities: { session: {} },
  }))
  .onRequest(calls.session.new, ({ params: { cwd } }) => {
    const sessionId = randomUUID();
    sessions.set(sessionId, { cwd, messages: [] });
    return { sessionId };
  })
  .onRequest(calls.session.list, ({ params }) => {
    const found = [...sessions].filter(([, { cwd }]) => !params.cwd || cwd === params.cwd);
    return { sessions: found.map(([sessionId, { cwd }]) => ({ sessionId, cwd })) };
  })
  .onRequest(calls.session.resume, async ({ params: { sessionId, replayFrom }, client }) => {
    if (!sessions.has(sessionId)) throw acp.RequestError.resourceNotFound(sessionId);
    const shown = replayFrom ? sessions.get(sessionId).messages : [];
    for (const update of shown) await tell(client, sessionId, update);
    await tell(client, sessionId, { sessionUpdate: "state_update", state: "idle" });
    return {};
  })
  .onRequest(calls.session.close, async ({ params }) => {
    await running.get(params.sessionId)?.();
    return {};
  })
  .onRequest(calls.session.prompt, ({ params, client }) => {
    const messageId = randomUUID();
    if (!sessions.has(params.sessionId)) throw acp.RequestError.resourceNotFound(params.sessionId);
    setImmediate(() => turn(client, params.sessionId, messageId, params.prompt));
    return { messageId };
  })
  .onNotification(calls.session.cancel, ({ params }) => running.get(params.sessionId)?.())
  .connect(acp.ndJsonStream(Writable.toWeb(process.stdout), Readable.toWeb(process.stdin)));
