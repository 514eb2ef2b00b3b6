// The official TypeScript client in conversation with an agent: `node client.mjs COMMAND ARGUMENT...`.
// Converses as judge.mjs says. Prints what it was answered, shown and asked as JSON.
import { spawn } from "node:child_process";
import { once } from "node:events";
import { Readable, Writable } from "node:stream";
import * as acp from "@agentclientprotocol/sdk";
import { client, converse, questions } from "./judge.mjs";

const [command, ...args] = process.argv.slice(2);
const child = spawn(command, args, { stdio: ["pipe", "pipe", "inherit"] });
const ended = once(child, "exit");

const stream = acp.ndJsonStream(Writable.toWeb(child.stdin), Readable.toWeb(child.stdout));
const seen = await client().connectWith(stream, converse);
child.stdin.end();
const [exit] = await ended;
console.log(JSON.stringify({ ...seen, questions, exit }));
