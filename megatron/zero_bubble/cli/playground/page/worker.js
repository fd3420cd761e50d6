"use strict";
// The planner in a worker of the page: this package on Pyodide, which is CPython compiled to WebAssembly, so that its
// answers are those of the command line. The first message is empty when it can answer, or says why it cannot.

async function start() {
  importScripts("pyodide/pyodide.js");
  const [python, reply] = await Promise.all([loadPyodide({indexURL: "pyodide/"}), fetch("planner.zip")]);
  if (!reply.ok) throw new Error("planner.zip is missing");
  python.unpackArchive(await reply.arrayBuffer(), "zip", {extractDir: "planner"});
  python.runPython("import sys; sys.path.append('planner')");
  const answers = python.pyimport("megatron.zero_bubble.cli.playground.answers").Answers();
  onmessage = ({data: {query, part}}) => postMessage(answers.reply(query, part));
}

start().then(() => postMessage(""), (error) => postMessage(error.message));
