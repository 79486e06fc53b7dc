// The conversations in memory. A conversation is a tree of messages: an edited question or a second answer is a
// sibling of the first. Each tab shows one path through it, from the root to a leaf.
//   chat     {id, title, titled, created, updated, leaf}
//   message  {id, chat, parent, role, content, time, ...}; of answers also {reasoning, thinkMs, calls, stats, error,
//            state, saved}; of questions {files}; of results of tools {callId, name}
import * as store from './store.js';

export const chats = new Map();
const trees = new Map();  // chat → Map of its messages
const leaves = new Map();  // chat → leaf that this tab shows
export const events = new EventTarget();
const tell = (type, detail) => events.dispatchEvent(new CustomEvent(type, { detail }));

export async function load() {
  for (const chat of await store.allChats()) chats.set(chat.id, chat);
}

export async function open(id) {
  if (trees.has(id)) return;
  const messages = await store.messagesOf(id).catch(() => []);
  if (!trees.has(id)) trees.set(id, new Map(messages.map(message => [message.id, message])));
}

const tree = chat => trees.get(chat) ?? new Map();
export const message = (chat, id) => tree(chat).get(id);

export function children(chat, parent) {
  return [...tree(chat).values()].filter(m => m.parent === parent).sort((a, b) => a.time - b.time);
}

function newestLeaf(chat, id) {
  for (;;) {
    const next = children(chat, id);
    if (next.length === 0) return id;
    id = next.at(-1).id;
  }
}

/// From the first message to the leaf that is shown.
export function path(chat, leaf = leaves.get(chat) ?? chats.get(chat)?.leaf) {
  const messages = tree(chat), out = [];
  if (!messages.has(leaf)) leaf = newestLeaf(chat, null);
  for (let m = messages.get(leaf); m; m = messages.get(m.parent)) out.unshift(m);
  return out;
}

export function show(chat, id) {
  const leaf = newestLeaf(chat, id);
  leaves.set(chat, leaf);
  store.changeChat(chat, { leaf });
  tell('messages', chat);
}

export function newChat(title) {
  const now = Date.now(), chat = { id: store.newId(), title, titled: false, created: now, updated: now, leaf: null };
  chats.set(chat.id, chat);
  trees.set(chat.id, new Map());
  store.putAll([chat], []);
  tell('chats');
  return chat.id;
}

export function add(fields) {
  const made = { id: store.newId(), time: Date.now(), ...fields };
  tree(made.chat).set(made.id, made);
  leaves.set(made.chat, made.id);
  save(made, { leaf: made.id, updated: made.time });
  tell('messages', made.chat);
  return made;
}

/// A message that was deleted meanwhile stays deleted.
export function save(changed, fields) {
  if (!tree(changed.chat).has(changed.id)) return Promise.resolve();
  changed.saved = Date.now();
  Object.assign(chats.get(changed.chat) ?? {}, fields);
  if (fields) tell('chats');
  return store.saveMessage({ ...changed }, fields);
}

export const drawn = changed => tell('message', changed);

export function rename(id, title) {
  Object.assign(chats.get(id), { title, titled: true });
  store.changeChat(id, { title, titled: true });
  tell('chats');
}

/// The message and all that follows it. Returns what puts them back.
export function removeMessage(chat, id) {
  const gone = [];
  const collect = one => { gone.push(message(chat, one)); children(chat, one).forEach(c => collect(c.id)); };
  collect(id);
  const { parent } = gone[0];
  gone.forEach(m => tree(chat).delete(m.id));
  store.deleteMessages(chat, gone.map(m => m.id));
  const sibling = children(chat, parent).at(-1);
  show(chat, sibling ? sibling.id : parent);
  return () => {
    gone.forEach(m => tree(chat).set(m.id, m));
    store.putAll([], gone);
    show(chat, id);
  };
}

export async function removeChat(id) {
  await open(id);
  const chat = chats.get(id), messages = [...tree(id).values()];
  forget(id);
  store.deleteChat(id);
  tell('chats');
  return () => putBack([chat], messages);
}

function forget(id) {
  chats.delete(id);
  trees.delete(id);
  leaves.delete(id);
}

function take(newChats, newMessages) {
  for (const chat of newChats) chats.set(chat.id, chat);
  for (const m of newMessages) trees.get(m.chat)?.set(m.id, m);
  tell('chats');
  for (const chat of new Set(newMessages.map(m => m.chat))) tell('messages', chat);
}

export function putBack(newChats, newMessages) {
  for (const chat of newChats) if (!trees.has(chat.id)) trees.set(chat.id, new Map());
  take(newChats, newMessages);
  return store.putAll(newChats, newMessages);
}

/// A new conversation with copies of the messages up to this one.
export function branch(chat, id) {
  const made = newChat(chats.get(chat).title), copies = [];
  let parent = null;
  for (const old of path(chat, id)) {
    copies.push({ ...old, id: store.newId(), chat: made, parent });
    parent = copies.at(-1).id;
  }
  putBack([{ ...chats.get(made), leaf: parent }], copies);
  return made;
}

/// What other tabs did.
store.listen(news => {
  if (news.chats) take(news.chats, news.messages);
  if (news.goneChat) { forget(news.goneChat); tell('chats'); }
  if (news.gone) {
    news.gone.forEach(id => tree(news.chat).delete(id));
    tell('messages', news.chat);
  }
  if (news.fields && chats.has(news.chat)) { Object.assign(chats.get(news.chat), news.fields); tell('chats'); }
  if (news.message && trees.has(news.chat)) hearMessage(news.message);
});

function hearMessage(heard) {
  const known = tree(heard.chat).has(heard.id), shown = path(heard.chat).at(-1)?.id ?? null;
  tree(heard.chat).set(heard.id, heard);
  if (known) { drawn(heard); return; }
  leaves.set(heard.chat, heard.parent === shown ? heard.id : shown);
  tell('messages', heard.chat);
}
