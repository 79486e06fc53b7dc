// What a person may set, kept in localStorage for all tabs, and its dialog.
import { $, element, iconButton } from './dom.js';

const kStored = 'quern.settings';
export const settings = read();
export const server = { models: [], props: null };  // what /v1/models and /props say
let changed = () => {};

function read() {
  try { return JSON.parse(localStorage.getItem(kStored)) ?? {}; } catch { return {}; }
}

function set(name, value) {
  if (value === '' || value === undefined) delete settings[name];
  else settings[name] = value;
  try { localStorage.setItem(kStored, JSON.stringify(settings)); } catch { /* they hold until the page is closed */ }
  changed(name);
}

/// Returns a number, '' for none, or throws a sentence. A decimal comma is one.
export function readNumber(text, { whole = false, least = -Infinity, most = Infinity }) {
  const trimmed = text.trim();
  if (trimmed === '') return '';
  const value = Number(whole ? trimmed : trimmed.replace(',', '.'));
  const example = whole ? 'a whole number, such as 1024' : 'a number, such as 0.7';
  if (!Number.isFinite(value) || (whole && !Number.isInteger(value))) throw new Error(`“${trimmed}” is not ${example}.`);
  if (value < least || value > most) throw new Error(`It must lie between ${least} and ${most === Infinity ? 'what fits' : most}.`);
  return value;
}

function readTools(text) {
  if (text.trim() === '') return '';
  let list;
  try { list = JSON.parse(text); } catch (error) { throw new Error('This is not JSON: ' + error.message); }
  if (!Array.isArray(list) || !list.every(tool => tool?.function?.name))
    throw new Error('It must be a list of {"type": "function", "function": {"name": …}}.');
  return text;
}

const kFields = [
  { name: 'system', label: 'System prompt', kind: 'area', hint: 'Told to the model before each conversation.' },
  { name: 'model', label: 'Model', kind: 'select', options: () => server.models.map(m => [m.id, m.id]) },
  { name: 'think', label: 'Thinking', kind: 'select', options: () => [['', 'as the server does' + onOff('thinking')], ['on', 'on'], ['off', 'off']] },
  { name: 'temperature', label: 'Temperature', kind: 'number', least: 0, most: 5, hint: '0 always takes the likeliest token.' },
  { name: 'top_p', label: 'Top p', kind: 'number', least: 0, most: 1 },
  { name: 'top_k', label: 'Top k', kind: 'number', whole: true, least: 0 },
  { name: 'min_p', label: 'Min p', kind: 'number', least: 0, most: 1 },
  { name: 'presence_penalty', label: 'Presence penalty', kind: 'number', least: -2, most: 2 },
  { name: 'max_tokens', label: 'Longest answer, in tokens', kind: 'number', whole: true, least: 1 },
  { name: 'theme', label: 'Colours', kind: 'select', options: () => [['', 'as the system'], ['light', 'light'], ['dark', 'dark']] },
  { name: 'key', label: 'API key', kind: 'password', hint: 'Kept in this browser, sent to this server only.' },
  { name: 'tools', label: 'Tools (JSON)', kind: 'area', parse: readTools, hint: 'What the model may call, as in the OpenAI API. You are asked for each result.' },
];

function defaults() {
  const aliases = server.props?.aliases ?? [];
  return aliases.find(a => a.name === settings.model) ?? aliases[0] ?? {};
}

function onOff(name) {
  const value = defaults()[name];
  return value === undefined ? '' : value ? ' (on)' : ' (off)';
}

function placeholder(field) {
  if (field.name === 'max_tokens') return server.props ? `no limit (context ${server.props.n_ctx})` : 'no limit';
  const value = defaults()[field.name];
  return value === undefined ? "the server's default" : `${Number(value.toPrecision(4))} (the server's default)`;
}

function control(field) {
  const id = 'set-' + field.name, value = settings[field.name] ?? '';
  const common = { id, 'aria-describedby': id + '-hint', autocomplete: 'off' };
  if (field.kind === 'area') return element('textarea', { ...common, rows: 3, value });
  if (field.kind !== 'select')
    return element('input', { ...common, value, type: field.kind === 'password' ? 'password' : 'text',
      inputMode: field.kind !== 'number' ? 'text' : field.whole ? 'numeric' : 'decimal',
      placeholder: field.kind === 'number' ? placeholder(field) : '' });
  const select = element('select', common, ...field.options().map(([v, text]) => element('option', { value: v }, text)));
  select.value = value;
  if (select.selectedIndex < 0) select.selectedIndex = 0;
  return select;
}

function row(field) {
  const input = control(field), hint = element('span', { id: input.id + '-hint', className: 'hint' }, field.hint ?? '');
  input.addEventListener('change', () => {
    try {
      const parse = field.parse ?? (field.kind === 'number' ? text => readNumber(text, field) : text => text);
      const value = parse(input.value);
      set(field.name, value);
      if (field.kind === 'number') input.value = value;
      input.removeAttribute('aria-invalid');
      hint.textContent = field.hint ?? '';
    } catch (error) {
      input.setAttribute('aria-invalid', 'true');
      hint.textContent = error.message + (settings[field.name] === undefined ? '' : ` ${settings[field.name]} still holds.`);
    }
    hint.classList.toggle('error', input.hasAttribute('aria-invalid'));
  });
  const wide = field.kind === 'area' ? 'field across' : 'field';
  return element('div', { className: wide }, element('label', { htmlFor: input.id }, field.label), input, hint);
}

export function openSettings(focus) {
  const dialog = $('settings');
  dialog.replaceChildren(
    element('div', { className: 'row' }, element('h2', { id: 'settingstitle' }, 'Settings'),
      iconButton('close', 'Close', () => dialog.close())),
    element('div', { className: 'fields' }, ...kFields.map(row)),
    element('p', { className: 'hint' }, server.props ? `${server.props.build_info} · ${server.props.model} · context of ${server.props.n_ctx} tokens` : ''));
  if (!dialog.open) dialog.showModal();
  if (focus) $('set-' + focus).focus();
}

/// The fields of a request that the settings decide.
export function requestFields() {
  const body = { stream: true, stream_options: { include_usage: true }, return_progress: true, timings_per_token: true };
  for (const { name, kind } of kFields)
    if (kind === 'number' && settings[name] !== undefined) body[name] = Number(settings[name]);
  if (server.models.some(m => m.id === settings.model)) body.model = settings.model;
  if (settings.think) body.chat_template_kwargs = { enable_thinking: settings.think === 'on' };
  if (settings.tools) body.tools = JSON.parse(settings.tools);
  return body;
}

function applyTheme() { document.documentElement.dataset.theme = settings.theme ?? ''; }

/// `hear(name)` after each change, in this tab or another.
export function watchSettings(hear) {
  changed = name => { applyTheme(); hear(name); };
  applyTheme();
  addEventListener('storage', event => {
    if (event.key !== kStored) return;
    const now = read();
    for (const name of Object.keys({ ...settings, ...now })) {
      if (now[name] === undefined) delete settings[name];
      else settings[name] = now[name];
    }
    changed('');
  });
}
