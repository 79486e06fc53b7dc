// The messages of the conversation that is shown, and where the reader is in them.
import * as answers from './answers.js';
import { $, announce, toast } from './dom.js';
import * as model from './model.js';
import { openSettings } from './settings.js';
import { Turn } from './turn.js';

const kNearPx = 60;
let chat = null, turns = new Map(), following = true, drawing = 0;
let go = () => {};

export const current = () => chat;

function withoutId({ id, time, ...rest }) { return rest; }

const actions = {
  redraw: () => draw(),
  settings: openSettings,
  again(m) {
    if (m.error && !m.content && !m.reasoning) model.removeMessage(m.chat, m.id);  // nothing worth a version
    follow();
    answers.begin(m.chat, m.parent);
  },
  proceed(m) {
    follow();
    answers.proceed(m);
  },
  branch: m => { go(model.branch(m.chat, m.id)); toast('This is a new conversation; the old one is as it was.'); },
  remove(m) {
    if (answers.runningIn(m.chat)) answers.stop(m.chat);
    toast('Deleted with what followed.', 'Undo', model.removeMessage(m.chat, m.id));
  },
  sibling(m, by) {
    const all = model.children(m.chat, m.parent);
    model.show(m.chat, all[all.findIndex(one => one.id === m.id) + by].id);
  },
  edit(m, content) {
    const copy = { chat: m.chat, parent: m.parent, role: m.role, content };
    if (m.role !== 'user') { model.add({ ...withoutId(m), ...copy, state: 'done' }); return; }
    const made = model.add({ ...copy, files: m.files });
    follow();
    answers.begin(m.chat, made.id);
  },
  result(m, call, content) {
    const open = model.path(m.chat).filter(one => one.role === 'tool').map(one => one.callId);
    const made = model.add({ chat: m.chat, parent: model.path(m.chat).at(-1).id, role: 'tool', callId: call.id, name: call.name, content });
    if (m.calls.every(one => one.id === call.id || open.includes(one.id))) { follow(); answers.begin(m.chat, made.id); }
  },
};

function draw() {
  drawing = 0;
  const path = chat ? model.path(chat) : [], before = turns, box = $('turns');
  turns = new Map(path.map(m => [m.id, before.get(m.id) ?? new Turn(m, actions)]));
  path.forEach((m, i) => {
    const turn = turns.get(m.id), all = model.children(chat, m.parent);
    turn.update(m, { index: all.findIndex(one => one.id === m.id), count: all.length }, i === path.length - 1);
    if (box.children[i] !== turn.element) box.insertBefore(turn.element, box.children[i] ?? null);
  });
  while (box.children.length > path.length) box.lastChild.remove();
  $('welcome').hidden = path.length > 0;
  $('markdown').hidden = path.length === 0;
  settle();
}

function settle() {
  const log = $('log');
  if (following) log.scrollTop = log.scrollHeight;
  $('down').hidden = following || log.scrollHeight - log.scrollTop - log.clientHeight < kNearPx;
}

/// At most once a frame.
export function redraw() { drawing ||= requestAnimationFrame(draw); }

export function follow() {
  following = true;
  settle();
}

export async function show(id) {
  if (id) await model.open(id);
  chat = id;
  turns = new Map();
  $('turns').replaceChildren();
  following = true;
  draw();
}

export const lastTurn = role => [...turns.values()].findLast(turn => turn.message.role === role);

export function start(goTo) {
  go = goTo;
  const log = $('log');
  let top = 0;
  log.addEventListener('scroll', () => {
    const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < kNearPx;
    // What grows below does not end following; only a reader who goes up does.
    if (atEnd) following = true;
    else if (log.scrollTop < top) following = false;
    top = log.scrollTop;
    $('down').hidden = following || atEnd;
  }, { passive: true });
  new ResizeObserver(settle).observe($('turns'));
  $('down').onclick = () => { follow(); announce('At the newest message'); };
  model.events.addEventListener('messages', event => { if (event.detail === chat) redraw(); });
  model.events.addEventListener('message', event => { if (event.detail.chat === chat) redraw(); });
  setInterval(() => {  // answers whose tab has gone
    if ([...turns.values()].some(t => t.message.state === 'streaming' && !answers.isRunning(t.message.id))) redraw();
  }, 1000);
}
