// The official TypeScript client of ACP version 2, a draft: `node client_v2.mjs COMMAND ARGUMENT...`.
// Runs a permitted command, cancels another by its tool call, resumes the session with a replay, and prints what it has
// seen as JSON.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk/experimental/v2";

const { agent: calls, client: answers } = acp.methods;
const [command, ...args] = process.argv.slice(2);
const child = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
const ended = once(child, "exit");
const questions = [];

async function watch(session, act = () => {}) {
  const updates = [];
  for (;;) {
    const { update } = await session.nextUpdate();
    if (!update) continue;
    updates.push(update);
    if (update.stopReason) return updates;
    await act(update);
  }
}

const app = acp.client({ name: "reference client" }).onRequest(answers.session.requestPermission, ({ params }) => {
  questions.push(params);
  const { optionId } = params.options.find((option) => option.kind === "allow_once");
  return { outcome: { outcome: "selected", optionId } };
});
const replayed = [];
let replayEnds;
app.onNotification(answers.session.update, ({ params }) => {
  replayed.push(params.update);
  const { sessionUpdate, stopReason } = params.update;
  if (sessionUpdate === "state_update" && !stopReason) replayEnds?.(); // not the end of the turn before
});

const stream = acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout));
const seen = await app.connectWith(stream, async (agent) => {
  const greeting = await agent.request(calls.initialize, {
    protocolVersion: acp.PROTOCOL_VERSION,
    info: { name: "reference client", version: "0" },
    capabilities: {},
  });
  const session = await agent.buildSession(process.cwd()).start();
  const first = await session.prompt("What is six times seven?");
  const finished = await watch(session);
  await session.prompt("Wait for me.");
  const cancelled = await watch(session, async ({ toolCallId, status }) => {
    if (status === "in_progress" && session.canCancelToolCall(toolCallId)) await session.cancelToolCall(toolCallId);
  });
  const { sessionId } = session;
  session.dispose();
  replayed.length = 0;
  const state = new Promise((resolve) => (replayEnds = resolve)); // the session's state ends its replay
  await agent.request(calls.session.resume, { sessionId, cwd: process.cwd(), replayFrom: { type: "start" } });
  await state;
  return { greeting, first, finished, cancelled, replayed: [...replayed] };
});
child.stdin.end();
const [exit] = await ended;
console.log(JSON.stringify({ ...seen, questions, exit }));
