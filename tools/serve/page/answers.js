// Answers that are being written. They go on while another conversation is shown, and are saved as they grow.
import { stream } from './api.js';
import { announce, number, seconds } from './dom.js';
import * as model from './model.js';
import { settings, requestFields } from './settings.js';

const kSaveMs = 400, kSilentMs = 5000;
const running = new Map();  // message id → AbortController

export const isRunning = id => running.has(id);
export const runningIn = chat => [...running.values()].find(run => run.chat === chat);

/// Whether a tab still writes this answer; if not, what is there is all.
export const isAlive = m => m.state === 'streaming' && (running.has(m.id) || Date.now() - m.saved < kSilentMs);

export function stop(chat) { runningIn(chat)?.abort.abort(); }

function fileText({ name, text }) {
  const fence = '`'.repeat(Math.max(3, ...[...text.matchAll(/`{3,}/g)].map(m => m[0].length + 1)));
  return `\n\nFile ${name}:\n${fence}\n${text}${text.endsWith('\n') ? '' : '\n'}${fence}`;
}

/// Images before the words.
function questionContent(m) {
  const files = m.files ?? [], text = m.content + files.filter(f => !f.image).map(fileText).join('');
  const images = files.filter(f => f.image).map(f => ({ type: 'image_url', image_url: { url: f.image } }));
  return images.length ? [...images, { type: 'text', text }] : text;
}

function requestMessage(m, afterLastQuestion) {
  if (m.role === 'tool') return { role: 'tool', tool_call_id: m.callId, content: m.content };
  if (m.role === 'user') return { role: 'user', content: questionContent(m) };
  const out = { role: 'assistant', content: m.content };
  if (m.reasoning && afterLastQuestion) out.reasoning_content = m.reasoning;
  if (m.calls?.length)
    out.tool_calls = m.calls.map(c => ({ id: c.id, type: 'function', function: { name: c.name, arguments: c.arguments } }));
  return out;
}

function requestMessages(path) {
  const told = path.filter(m => m.role !== 'assistant' || m.content || m.calls?.length);
  const last = told.findLastIndex(m => m.role === 'user');
  const out = told.map((m, i) => requestMessage(m, i > last));
  if (settings.system) out.unshift({ role: 'system', content: settings.system });
  return out;
}

function addCalls(m, deltas) {
  m.calls ??= [];
  for (const delta of deltas) {
    const call = m.calls[delta.index] ??= { id: delta.id, name: '', arguments: '' };
    call.name += delta.function?.name ?? '';
    call.arguments += delta.function?.arguments ?? '';
  }
}

function statsOf(usage, timings, ms) {
  const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
  return `${number(usage.completion_tokens)} tokens at ${timings.predicted_per_second.toFixed(1)}/s · ` +
    `${number(usage.prompt_tokens)} of prompt, ${number(cached)} of them cached · ${seconds(ms)}`;
}

/// What one event of the stream changes.
function take(m, event, run) {
  const choice = event.choices?.[0], delta = choice?.delta ?? {};
  if (event.prompt_progress) run.progress = event.prompt_progress;
  if (event.timings) run.timings = event.timings;
  if (delta.reasoning_content) {
    run.thinkingSince ??= Date.now();
    m.reasoning += delta.reasoning_content;
    m.thinkMs = run.thought + Date.now() - run.thinkingSince;
  }
  if (delta.content) m.content += delta.content;
  if (delta.tool_calls) addCalls(m, delta.tool_calls);
  if (delta.reasoning_content || delta.content || delta.tool_calls) run.progress = null;
  if (choice?.finish_reason === 'length') m.cut = true;
  if (event.usage && run.timings) m.stats = statsOf(event.usage, run.timings, Date.now() - run.begun);
}

/// What the answer's foot says while it is written.
export function liveText(m) {
  const run = running.get(m.id);
  if (!run) return isAlive(m) ? 'Being written in another tab' : '';
  const p = run.progress;
  if (p && p.total > 0) return `Reading the prompt: ${number(p.processed)} of ${number(p.total)} tokens`;
  const t = run.timings;
  return t?.predicted_n > 1 ? `${number(t.predicted_n)} tokens at ${t.predicted_per_second.toFixed(1)}/s` : 'Waiting for the model';
}

export function liveShare(m) {
  const p = running.get(m.id)?.progress;
  return p && p.total > 0 ? p.processed / p.total : null;
}

/// Whether an answer ends in the middle, so that the model can write on. A call that was begun cannot be gone on with.
export const isUnfinished = m => m.role === 'assistant' && !isAlive(m) && (m.content || m.reasoning) && !m.calls?.length &&
  (m.state !== 'done' || m.cut === true);

/// Answers the path that ends with `parent`.
export function begin(chat, parent) {
  stop(chat);
  const messages = requestMessages(model.path(chat, parent));
  write(model.add({ chat, parent, role: 'assistant', content: '', reasoning: '', state: 'streaming', saved: Date.now() }), messages);
}

/// The model writes on where an unfinished answer ends, in its thinking if there are no words yet.
export function proceed(m) {
  stop(m.chat);
  const messages = requestMessages(model.path(m.chat, m.parent));
  messages.push({ ...requestMessage(m, true), reasoning_content: m.reasoning || undefined });
  Object.assign(m, { state: 'streaming', saved: Date.now(), cut: false, error: '', errorKind: '', errorDetail: '' });
  write(m, messages, { continue_final_message: true });
}

/// Puts what comes into `m`; `fields`: of the request, beside those of the settings.
async function write(m, messages, fields = {}) {
  const { chat } = m, abort = new AbortController();
  const run = { chat, abort, message: m, begun: Date.now(), thought: m.thinkMs ?? 0 };
  running.set(m.id, run);
  model.drawn(m);
  announce('Answering');
  const saving = setInterval(() => model.save(m), kSaveMs);
  try {
    for await (const event of stream('v1/chat/completions', { messages, ...requestFields(), ...fields }, abort.signal)) {
      take(m, event, run);
      model.drawn(m);
    }
    m.state = 'done';
  } catch (error) {
    m.state = error.name === 'AbortError' ? 'stopped' : 'failed';
    if (m.state === 'failed') Object.assign(m, { error: error.message, errorKind: error.kind, errorDetail: error.detail });
  }
  clearInterval(saving);
  running.delete(m.id);
  announce({ done: 'The answer is complete', stopped: 'Stopped' }[m.state] ?? 'Error: ' + m.error);
  model.save(m, { updated: Date.now() });
  model.drawn(m);
}

/// The last moment of a page that is reloaded or closed.
addEventListener('pagehide', () => {
  for (const { message } of running.values()) model.save(Object.assign(message, { state: 'interrupted' }));
});
