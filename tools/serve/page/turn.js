// One message as a person sees it.
import { copy, element, iconButton, seconds } from './dom.js';
import * as answers from './answers.js';
import { renderMarkdown } from './markdown.js';

const kNames = { user: 'You', assistant: 'Answer', tool: 'Result of a tool' };

function appendText(node, text) {  // keeps what is selected in it
  const held = node.firstChild;
  if (held && text.startsWith(held.data)) held.appendData(text.slice(held.data.length));
  else node.replaceChildren(document.createTextNode(text));
}

function pretty(json) {
  try { return JSON.stringify(JSON.parse(json), null, 2); } catch { return json; }
}

export class Turn {
  /// `actions`: {edit, again, proceed, branch, remove, sibling, result, settings}, each called with the message.
  constructor(message, actions) {
    this.actions = actions;
    this.message = message;
    this.body = element('div', { className: 'body' });
    this.foot = element('div', { className: 'foot' });
    this.element = element('article', { className: 'turn ' + message.role, id: 'm-' + message.id,
      'aria-label': kNames[message.role] }, this.body, this.foot);
    if (message.role === 'assistant') this.makeAnswerParts();
  }

  makeAnswerParts() {
    this.summary = element('summary', {});
    this.thoughts = element('div', { className: 'thoughts' });
    this.thinking = element('details', { className: 'thinking', hidden: true }, this.summary, this.thoughts);
    this.calls = element('div', { className: 'calls' });
    this.note = element('div', { className: 'note' });
    this.progress = element('progress', { max: 1, hidden: true, 'aria-label': 'Prompt read' });
    this.stats = element('span', { className: 'stats' });
    this.element.prepend(this.thinking);
    this.body.after(this.calls, this.note, this.progress);
  }

  /// `place`: {index, count} among the versions; `last`: nothing follows.
  update(message, place, last) {
    this.message = message;
    this.element.classList.toggle('last', last);
    if (!this.editing) {
      if (message.role === 'assistant') this.drawAnswer(last);
      else this.drawText();
    }
    this.drawFoot(place, last);
  }

  drawText() {
    const m = this.message, bubble = element('div', { className: 'bubble' }, m.content);
    if (m.role === 'tool') bubble.prepend(element('b', {}, `${m.name} returned`), '\n');
    for (const file of m.files ?? [])
      bubble.append(file.image ? element('img', { className: 'picture', src: file.image, alt: file.name }) :
        element('details', { className: 'file' }, element('summary', {}, file.name), element('pre', { tabIndex: 0 }, file.text)));
    this.body.replaceChildren(bubble);
  }

  drawAnswer(last) {
    const m = this.message, alive = answers.isAlive(m);
    this.element.classList.toggle('writing', alive);
    this.element.setAttribute('aria-busy', alive);
    this.thinking.hidden = !m.reasoning;
    appendText(this.thoughts, (m.reasoning ?? '').trim());
    const time = m.thinkMs ? seconds(m.thinkMs) : '';
    this.summary.textContent = alive && !m.content ? `Thinking ${time}` : `Thought for ${time || 'a moment'}`;
    renderMarkdown(this.body, m.content);
    this.drawCalls(last && !alive);
    const share = answers.liveShare(m);
    this.progress.hidden = share === null;
    if (share !== null) this.progress.value = share;
    this.stats.textContent = alive ? answers.liveText(m) : m.stats ?? '';
    this.drawNote(alive, last);
  }

  drawCalls(open) {
    const m = this.message, key = JSON.stringify([m.calls ?? [], open]);
    if (this.callsKey === key) return;
    this.callsKey = key;
    this.calls.replaceChildren(...(m.calls ?? []).map(call => this.callBox(call, open)));
  }

  callBox(call, open) {
    const box = element('details', { className: 'call', open: true },
      element('summary', {}, 'Calls ', element('code', {}, call.name)), element('pre', { tabIndex: 0 }, pretty(call.arguments)));
    if (!open) return box;
    const input = element('textarea', { rows: 2, 'aria-label': 'Result of ' + call.name, placeholder: 'Its result' });
    const give = element('button', { type: 'button', onclick: () => this.actions.result(this.message, call, input.value) }, 'Send result');
    box.append(element('div', { className: 'row result' }, input, give));
    return box;
  }

  drawNote(alive, last) {
    const m = this.message, lines = [];
    if (m.state === 'stopped') lines.push('Stopped.');
    if (!alive && (m.state === 'interrupted' || m.state === 'streaming'))
      lines.push('The page was closed while this was written. What had come is kept.');
    if (m.cut) lines.push('Cut off: the longest answer or the context is reached.');
    if (m.error) lines.push(m.error);
    const unfinished = answers.isUnfinished(m), key = JSON.stringify([lines, m.errorDetail, unfinished, last]);
    if (this.noteKey === key) return;
    this.noteKey = key;
    this.note.className = m.error ? 'note error' : 'note';
    this.note.replaceChildren(...lines.map(line => element('p', {}, line)));
    if (m.errorDetail) this.note.append(element('details', {}, element('summary', {}, "The server's words"), m.errorDetail));
    if (m.errorKind === 'key') this.note.append(element('button', { type: 'button', onclick: () => this.actions.settings('key') }, 'Enter the key'));
    if (unfinished && last)
      this.note.append(element('button', { type: 'button', className: 'proceed', onclick: () => this.actions.proceed(this.message) }, 'Continue'));
    if (m.error || m.state === 'interrupted' || (m.state === 'streaming' && !alive))
      this.note.append(element('button', { type: 'button', className: 'retry', onclick: () => this.actions.again(this.message) }, 'Try again'));
  }

  drawFoot(place, last) {
    const m = this.message, alive = answers.isAlive(m), key = JSON.stringify([m.role, place, alive, this.editing, last]);
    if (this.footKey === key) return;
    this.footKey = key;
    const tools = element('div', { className: 'tools' });
    if (place.count > 1) tools.append(this.versions(place));
    if (!alive && !this.editing) tools.append(...this.buttons());
    this.foot.replaceChildren(tools);
    if (m.role === 'assistant') this.foot.append(this.stats);
  }

  versions({ index, count }) {
    const step = (by, name) => {
      const button = iconButton(by < 0 ? 'left' : 'right', name, () => this.actions.sibling(this.message, by));
      button.disabled = index + by < 0 || index + by >= count;
      return button;
    };
    return element('span', { className: 'versions' }, step(-1, 'Earlier version'), `${index + 1}/${count}`, step(1, 'Later version'));
  }

  buttons() {
    const m = this.message, act = name => () => this.actions[name](this.message);
    const copying = iconButton('copy', 'Copy', () => copy(this.message.content, copying));
    const out = [copying];
    if (m.role === 'assistant') out.push(iconButton('again', 'Answer again', act('again'), 'regenerate'));
    out.push(iconButton('edit', 'Edit', () => this.edit(), 'edit'));
    out.push(iconButton('branch', 'Go on from here in a new conversation', act('branch'), 'branch'));
    out.push(iconButton('trash', 'Delete this and what follows', act('remove'), 'remove'));
    return out;
  }

  edit() {
    const m = this.message, box = element('textarea', { value: m.content, 'aria-label': 'Edit message' });
    const end = () => { this.editing = false; this.body.renderedBlocks = []; this.body.replaceChildren(); this.actions.redraw(); };
    const save = () => { const text = box.value; end(); this.actions.edit(m, text); };
    box.oninput = () => growBox(box);
    box.onkeydown = event => {
      if (event.key === 'Escape') { event.stopPropagation(); end(); }
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) save();
    };
    this.editing = true;
    this.body.replaceChildren(element('div', { className: 'editor' }, box, element('div', { className: 'row' },
      element('span', { className: 'hint' }, 'The old version stays beside it.'),
      element('button', { type: 'button', onclick: end }, 'Cancel'),
      element('button', { type: 'button', className: 'primary', onclick: save }, m.role === 'user' ? 'Send' : 'Save'))));
    this.actions.redraw();
    growBox(box);
    box.focus();
  }
}

/// As high as its text; CSS limits it.
export function growBox(box) {
  box.style.height = 'auto';
  box.style.height = box.scrollHeight + 2 + 'px';
}
