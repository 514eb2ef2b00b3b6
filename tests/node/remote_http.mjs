// The official TypeScript client of an agent over streamable HTTP: `node remote_http.mjs URL TOKEN`.
// Runs the conversation of conversation.mjs, then connects again and loads the session. Prints the answers, updates and
// permission requests as JSON.
import * as acp from "@agentclientprotocol/sdk";
import { createHttpStream } from "@agentclientprotocol/sdk/experimental/http-client";
import { client, converse, greet, questions } from "./conversation.mjs";

const { agent: calls, client: answers } = acp.methods;
const [url, token] = process.argv.slice(2);
const replayed = [];

async function loadAgain(agent, sessionId) {
  await greet(agent);
  await agent.request(calls.session.load, { sessionId, cwd: process.cwd(), mcpServers: [] });
  const prompt = [{ type: "text", text: "And now?" }];
  return { replayed: [...replayed], response: await agent.request(calls.session.prompt, { sessionId, prompt }) };
}

async function withConnection(work) {
  const stream = createHttpStream(url, { headers: { Authorization: `Bearer ${token}` } });
  const app = client().onNotification(answers.session.update, ({ params }) => void replayed.push(params.update));
  return await app.connectWith(stream, work);
}

const first = await withConnection(converse);
replayed.length = 0;
const second = await withConnection((agent) => loadAgain(agent, first.sessionId));
console.log(JSON.stringify({ ...first, questions, second }));
