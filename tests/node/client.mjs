// The official TypeScript client of an agent: `node client.mjs COMMAND ARGUMENT...`.
// Runs the conversation of conversation.mjs and prints the answers, updates and permission requests as JSON.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk";
import { client, converse, questions } from "./conversation.mjs";

const [command, ...args] = process.argv.slice(2);
const child = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
const ended = once(child, "exit");

const stream = acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout));
const seen = await client().connectWith(stream, converse);
child.stdin.end();
const [exit] = await ended;
console.log(JSON.stringify({ ...seen, questions, exit }));
