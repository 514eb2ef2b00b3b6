// The official TypeScript client in conversation with an agent behind a WebSocket: `node remote.mjs URL TOKEN`.
// Connects as a page in a browser does it, which can set no header. Converses as judge.mjs says; then connects anew, and
// loads the session. Prints what it was answered, shown and asked as JSON.
import * as acp from "@agentclientprotocol/sdk";
import { createWebSocketStream } from "@agentclientprotocol/sdk/experimental/ws-client";
import { client, converse, greet, questions } from "./judge.mjs";

const { agent: calls, client: answers } = acp.methods;
const [url, token] = process.argv.slice(2);
const replayed = [];

async function comeBack(agent, sessionId) {
  await greet(agent);
  await agent.request(calls.session.load, { sessionId, cwd: process.cwd(), mcpServers: [] });
  const prompt = [{ type: "text", text: "And now?" }];
  return { replayed: [...replayed], response: await agent.request(calls.session.prompt, { sessionId, prompt }) };
}

async function connected(work) {
  const stream = createWebSocketStream(url, { protocols: ["acp", `bearer.${token}`] });
  const judge = client().onNotification(answers.session.update, ({ params }) => void replayed.push(params.update));
  return await judge.connectWith(stream, work);
}

const first = await connected(converse);
replayed.length = 0;
const second = await connected((agent) => comeBack(agent, first.sessionId));
console.log(JSON.stringify({ ...first, questions, second }));
