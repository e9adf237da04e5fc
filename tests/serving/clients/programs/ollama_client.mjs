// Asks a server by Ollama's client for JavaScript, and prints what it got as one line of JSON.
//
//     node ollama_client.mjs NODE_MODULES URL MODEL
import { createRequire } from 'node:module'

const [modules, host, model] = process.argv.slice(2)
const { Ollama } = createRequire(`${modules}/here.js`)('ollama')
const client = new Ollama({ host })
const asked = { model, messages: [{ role: 'user', content: 'def add(a, b):' }], options: { temperature: 0, num_predict: 12 } }

const joined = async (parts, text) => {
  let found = ''
  for await (const part of parts) found += text(part)
  return found
}
const refused = async (call) => {
  try {
    await call()
  } catch (error) {
    return { name: error.name, message: error.message, status: error.status_code }
  }
}

console.log(JSON.stringify({
  whole: await client.chat(asked),
  streamed: await joined(await client.chat({ ...asked, stream: true }), (part) => part.message.content),
  generated: await joined(
    await client.generate({ model, prompt: 'def add(a, b):', options: asked.options, stream: true }), (part) => part.response),
  listed: (await client.list()).models.map((each) => each.name),
  running: (await client.ps()).models.map((each) => each.name),
  version: (await client.version()).version,
  capabilities: (await client.show({ model })).capabilities,
  pulled: await refused(() => client.pull({ model: 'other' })),
  unknown: await refused(() => client.chat({ ...asked, model: 'other', stream: true })),
}))
