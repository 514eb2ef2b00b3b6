// The official TypeScript client in conversation with an agent behind a WebSocket: `node remote.mjs URL TOKEN`.
// Connects as a page in a browser does it, which can set no header. Opens a session here, says two things, and cancels
// the second as soon as its tool call runs; then connects anew, and loads the session. Prints what it was answered,
// shown and asked as JSON.
import * as acp from "@agentclientprotocol/sdk";
import { createWebSocketStream } from "@agentclientprotocol/sdk/experimental/ws-client";

const { agent: calls, client: answers } = acp.methods;
const [url, token] = process.argv.slice(2);
const questions = [];
const replayed = [];

function permit({ params }) {
  questions.push(params);
  const { optionId } = params.options.find((option) => option.kind === "allow_once");
  return { outcome: { outcome: "selected", optionId } };
}

async function say(session, text, watch) {
  const response = session.prompt(text);
  const updates = [];
  for (;;) {
    const message = await session.nextUpdate();
    if (message.kind === "stop") return { response: await response, updates };
    updates.push(message.update);
    await watch(message.update);
  }
}

async function greet(agent) {
  return await agent.request(calls.initialize, {
    protocolVersion: acp.PROTOCOL_VERSION,
    clientInfo: { name: "judge", version: "0" },
    clientCapabilities: {},
  });
}

async function converse(agent) {
  const greeting = await greet(agent);
  const session = await agent.buildSession(process.cwd()).start();
  const { sessionId } = session;
  const finished = await say(session, "What is six times seven?", () => {});
  const cancelled = await say(session, "Wait for me.", async ({ status }) => {
    if (status === "in_progress") await agent.notify(calls.session.cancel, { sessionId });
  });
  return { greeting, sessionId, finished, cancelled };
}

async function comeBack(agent, sessionId) {
  await greet(agent);
  await agent.request(calls.session.load, { sessionId, cwd: process.cwd(), mcpServers: [] });
  const prompt = [{ type: "text", text: "And now?" }];
  return { replayed: [...replayed], response: await agent.request(calls.session.prompt, { sessionId, prompt }) };
}

async function connected(work) {
  const stream = createWebSocketStream(url, { protocols: ["acp", `bearer.${token}`] });
  const client = acp
    .client({ name: "judge" })
    .onRequest(answers.session.requestPermission, permit)
    .onNotification(answers.session.update, ({ params }) => void replayed.push(params.update));
  return await client.connectWith(stream, work);
}

const first = await connected(converse);
replayed.length = 0;
const second = await connected((agent) => comeBack(agent, first.sessionId));
console.log(JSON.stringify({ ...first, questions, second }));
