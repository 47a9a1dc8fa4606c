// Times llama.cpp on a GGUF file; cpu_model.py starts it and says what to do, line by line.
import {createRequire} from "node:module";
import {createInterface} from "node:readline";
import {pathToFileURL} from "node:url";

const [file, threads, folder] = process.argv.slice(2);
const found = createRequire(folder + "/").resolve("node-llama-cpp");
const {getLlama} = await import(pathToFileURL(found));
const llama = await getLlama({gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error"});
const model = await llama.loadModel({modelPath: file});
const context = await model.createContext({contextSize: 1024, batchSize: 512, threads: Number(threads)});
const sequence = context.getSequence();
const random = (count) => Array.from({length: count}, () => 300 + Math.floor(Math.random() * 31000));

async function prompt(count) {
    await sequence.clearHistory();
    const start = performance.now();
    await sequence.evaluateWithoutGeneratingNewTokens(random(count));
    return (performance.now() - start) / 1e3;
}

async function decode(count) {
    await sequence.clearHistory();
    let start, made = 0;
    for await (const _ of sequence.evaluate(random(16), {temperature: 0, yieldEogToken: true})) {
        start ??= performance.now(); // the first token
        if (made++ === count)
            break;
    }
    return (performance.now() - start) / 1e3;
}

console.log("ready");
for await (const line of createInterface({input: process.stdin})) {
    const [what, count] = line.split(" ");
    console.log(await {prompt, decode}[what](Number(count)));
}
process.exit(0);
