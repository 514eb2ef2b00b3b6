// The official TypeScript client in conversation with an agent: `node client.mjs COMMAND ARGUMENT...`.
// Opens a session here, says two things, and cancels the second as soon as its tool call runs. Prints what it was
// answered, shown and asked as JSON.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk";

const { agent: calls, client: answers } = acp.methods;
const [command, ...args] = process.argv.slice(2);
const child = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
const ended = once(child, "exit");
const questions = [];

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

async function converse(agent) {
  const greeting = await agent.request(calls.initialize, {
    protocolVersion: acp.PROTOCOL_VERSION,
    clientInfo: { name: "judge", version: "0" },
    clientCapabilities: {},
  });
  const session = await agent.buildSession(process.cwd()).start();
  const { sessionId } = session;
  const finished = await say(session, "What is six times seven?", () => {});
  const cancelled = await say(session, "Wait for me.", async ({ status }) => {
    if (status === "in_progress") await agent.notify(calls.session.cancel, { sessionId });
  });
  return { greeting, finished, cancelled };
}

const seen = await acp
  .client({ name: "judge" })
  .onRequest(answers.session.requestPermission, permit)
  .connectWith(acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout)), converse);
child.stdin.end();
const [exit] = await ended;
console.log(JSON.stringify({ ...seen, questions, exit }));
