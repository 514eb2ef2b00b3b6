// The conversation of the clients made with the official TypeScript SDK: initialize an agent, open a session in the
// current folder, and send two prompts, of which the second is cancelled as soon as its tool call runs. Every permission
// is given.
import * as acp from "@agentclientprotocol/sdk";

const { agent: calls, client: answers } = acp.methods;
export const questions = [];

export function client() {
  return acp.client({ name: "reference client" }).onRequest(answers.session.requestPermission, ({ params }) => {
    questions.push(params);
    const { optionId } = params.options.find((option) => option.kind === "allow_once");
    return { outcome: { outcome: "selected", optionId } };
  });
}

export async function greet(agent) {
  return await agent.request(calls.initialize, {
    protocolVersion: acp.PROTOCOL_VERSION,
    clientInfo: { name: "reference client", version: "0" },
    clientCapabilities: {},
  });
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

export async function converse(agent) {
  const greeting = await greet(agent);
  const session = await agent.buildSession(process.cwd()).start();
  const { sessionId } = session;
  const finished = await say(session, "What is six times seven?", () => {});
  const cancelled = await say(session, "Wait for me.", async ({ status }) => {
    if (status === "in_progress") await agent.notify(calls.session.cancel, { sessionId });
  });
  return { greeting, sessionId, finished, cancelled };
}
