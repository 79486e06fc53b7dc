// Talks to the server. Errors become sentences for people.
import { settings } from './settings.js';

export class Problem extends Error {
  /// `kind`: 'key' if a key may help. `detail`: the server's own words, if they say more.
  constructor(text, kind = '', detail = '') { super(text); Object.assign(this, { kind, detail }); }
}

const kLost = 'The server cannot be reached. Is it still running, and is this machine still on its network?';
const kBroken = 'The connection broke before the answer was complete. What came is kept.';

function headers() {
  const out = { 'Content-Type': 'application/json' };
  if (settings.key) out.Authorization = 'Bearer ' + settings.key;
  return out;
}

async function problemOf(reply) {
  const body = await reply.json().catch(() => ({})), said = body.error?.message ?? '';
  const seconds = Number(reply.headers.get('Retry-After')) || 1;
  switch (reply.status) {
    case 401:
    case 403:
      return new Problem(settings.key ? 'The server does not accept this API key.' : 'This server needs an API key.', 'key', said);
    case 413: return new Problem('The message is too long for this server.', '', said);
    case 429: return new Problem(`The server has more requests than it takes at once. Try again in ${seconds} s.`, '', said);
    case 503:
      if (body.status === 'loading' || body.error?.code === 'loading')
        return new Problem('The model is still being loaded. Try again in a moment.', '', said);
      return new Problem('The server takes no requests now.', '', said);
    default:
      return new Problem(said ? 'The server did not accept this request: ' + said : `The server answered with error ${reply.status}.`);
  }
}

async function send(path, options) {
  let reply;
  try {
    reply = await fetch(path, { headers: headers(), ...options });
  } catch (error) {
    throw error.name === 'AbortError' ? error : new Problem(kLost);
  }
  if (!reply.ok) throw await problemOf(reply);
  return reply;
}

export const get = async path => (await send(path)).json();

/// The events of a streamed answer, each an object.
export async function* stream(path, body, signal) {
  const reply = await send(path, { method: 'POST', body: JSON.stringify(body), signal });
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = '', complete = false;
  for (;;) {
    const { value, done } = await reader.read().catch(error => {
      throw error.name === 'AbortError' ? error : new Problem(kBroken);
    });
    if (done) break;
    const lines = (buffer + value).split('\n');
    buffer = lines.pop();
    for (const line of lines) {
      if (!line.startsWith('data:')) continue;
      const data = line.slice(5).trim();
      if (data === '[DONE]') { complete = true; continue; }
      const event = JSON.parse(data);
      if (event.error) throw new Problem('The server ended the answer with an error: ' + event.error.message);
      yield event;
    }
  }
  if (!complete) throw new Problem(kBroken);
}
