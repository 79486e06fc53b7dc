// Conversations as files: all of them as JSON, which can be read again, and one as Markdown.
import { download, toast } from './dom.js';
import * as model from './model.js';
import * as store from './store.js';

const kFormat = 'quern-conversations', kVersion = 1;
const day = () => new Date().toISOString().slice(0, 10);

export async function exportAll() {
  const chats = [...model.chats.values()], messages = await store.allMessages();
  download(`quern-${day()}.json`, 'application/json', JSON.stringify({ format: kFormat, version: kVersion, chats, messages }, null, 1));
  toast(`${chats.length} conversations are exported.`);
}

const isText = (...values) => values.every(v => typeof v === 'string');
const isChat = c => c && isText(c.id, c.title) && Number.isFinite(c.updated);
const isMessage = m => m && isText(m.id, m.chat, m.content) && ['user', 'assistant', 'tool'].includes(m.role) && Number.isFinite(m.time);

/// Conversations that are here already get the messages they lack; none is replaced.
export async function importFile(file) {
  let data;
  try { data = JSON.parse(await file.text()); } catch { data = null; }
  if (data?.format !== kFormat || !Array.isArray(data.chats) || !Array.isArray(data.messages)) {
    toast(`${file.name} holds no conversations that this page has exported.`);
    return;
  }
  const chats = data.chats.filter(c => isChat(c) && !model.chats.has(c.id)), known = new Set((await store.allMessages()).map(m => m.id));
  const places = new Set([...model.chats.keys(), ...chats.map(c => c.id)]);
  const messages = data.messages.filter(m => isMessage(m) && places.has(m.chat) && !known.has(m.id))
    .map(m => ({ ...m, parent: m.parent ?? null, state: m.state === 'streaming' ? 'interrupted' : m.state }));
  await model.putBack(chats, messages);
  const bad = data.chats.filter(c => !isChat(c)).length + data.messages.filter(m => !isMessage(m)).length;
  toast(`${chats.length} conversations and ${messages.length} messages are new.` + (bad ? ` ${bad} entries could not be read.` : ''));
}

export function saveMarkdown(chat) {
  const { title } = model.chats.get(chat), names = { user: 'You', assistant: 'Answer', tool: 'Result of a tool' };
  const parts = model.path(chat).map(m => `## ${names[m.role]}\n\n` + m.content +
    (m.files ?? []).map(f => f.image ? `\n\n![${f.name}](${f.image})` : `\n\n### ${f.name}\n\n~~~~\n${f.text}\n~~~~`).join('') +
    (m.calls ?? []).map(c => `\n\nCalls \`${c.name}\` with \`${c.arguments}\``).join(''));
  download(title.replace(/[^\p{L}\p{N} _-]/gu, '').trim().slice(0, 60) + '.md', 'text/markdown', [`# ${title}`, ...parts].join('\n\n') + '\n');
}

/// What an earlier version of the page kept: one conversation, in localStorage.
export async function importOld() {
  const kOld = 'quern.turns';
  let turns = [];
  try { turns = JSON.parse(localStorage.getItem(kOld)) ?? []; } catch { /* not ours */ }
  if (Array.isArray(turns) && turns.length > 0) {
    const id = store.newId(), time = Date.now() - turns.length;
    const messages = turns.map((t, i) => ({ ...t, id: id + i, chat: id, parent: i ? id + (i - 1) : null, time: time + i, state: 'done' }));
    const title = String(turns[0].content).slice(0, 60);
    await model.putBack([{ id, title, titled: false, created: time, updated: time, leaf: messages.at(-1).id }], messages);
  }
  localStorage.removeItem(kOld);
}
