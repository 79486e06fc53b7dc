// Small helpers to make elements, icons, notices.
export const $ = id => document.getElementById(id);

/// element('a', {className: 'x', onclick: f, 'aria-label': 'y'}, child, 'text', ...)
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in made) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null));
  return made;
}

const kIcons = {
  sidebar: 'M4 5h16v14H4zM9.5 5v14',
  download: 'M12 4v11m-4.5-4 4.5 4.5 4.5-4.5M5 20h14',
  keyboard: 'M3 7h18v10H3zM7 10.5h.01M11 10.5h.01M15 10.5h.01M8 14h8',
  sliders: 'M4 8h9m4 0h3M4 16h3m4 0h9M15 5.8v4.4M9 13.8v4.4',
  down: 'M12 5v13m-5.5-5.5L12 18l5.5-5.5',
  clip: 'm19 11-7.5 7.5a4.6 4.6 0 0 1-6.5-6.5l8-8a3 3 0 0 1 4.3 4.3L9.6 16a1.5 1.5 0 0 1-2.1-2.100L14.5 7',
  copy: 'M9 9h11v11H9zM5 15H4V4h11v1',
  done: 'm5 12.5 4.5 4.500L19 7.5',
  edit: 'M5 19h4L19.5 8.500l-4-4L5 15zM13 7l4 4',
  again: 'M19 12a7 7 0 1 1-2.1-5M19 3.500V8h-4.5',
  branch: 'M7 4v16M7 14c6 0 10-2 10-7M14 9.5 17 6.500l3 3',
  trash: 'M5 7h14M10 7V4.500h4V7M7 7l1 12.500h8L17 7',
  left: 'm14 6-6 6 6 6',
  right: 'm10 6 6 6-6 6',
  close: 'M6 6l12 12M18 6 6 18',
};

export function icon(name) {
  const space = 'http://www.w3.org/2000/svg', svg = document.createElementNS(space, 'svg');
  const path = document.createElementNS(space, 'path');
  svg.setAttribute('viewBox', '0 0 24 24');
  svg.setAttribute('aria-hidden', 'true');
  path.setAttribute('d', kIcons[name]);
  svg.append(path);
  return svg;
}

export function iconButton(name, label, onclick, cls = '') {
  return element('button', { type: 'button', className: `icon ${cls}`, 'aria-label': label, title: label, onclick },
    icon(name));
}

/// Fills the buttons of index.html that name an icon.
export function fillIcons() {
  for (const button of document.querySelectorAll('[data-icon]')) {
    button.append(icon(button.dataset.icon));
    button.title = button.getAttribute('aria-label');
  }
}

/// A line that goes by itself; with an action it stays longer.
export function toast(text, action, run) {
  const box = element('div', { className: 'toast', role: 'status' }, element('span', {}, text));
  if (action) box.append(element('button', { type: 'button', onclick: () => { box.remove(); run(); } }, action));
  $('toasts').append(box);
  setTimeout(() => box.remove(), action ? 10000 : 4000);
}

/// For people who hear the page: said once, unlike the answer, which changes all the time.
export function announce(text) { $('status').textContent = text; }

/// Pages that come over plain HTTP from another machine have no navigator.clipboard.
export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element('textarea', { value: text, className: 'unseen' });
    (document.querySelector('dialog[open]') ?? document.body).append(area);
    area.select();
    const good = document.execCommand('copy');
    area.remove();
    if (!good) { toast('The browser does not let this page copy.'); return; }
  }
  announce('Copied');
  if (!button) { toast('Copied'); return; }
  button.replaceChildren(icon('done'));
  setTimeout(() => button.replaceChildren(icon('copy')), 1500);
}

export function download(name, type, text) {
  const url = URL.createObjectURL(new Blob([text], { type }));
  element('a', { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60000);
}

export const number = n => Math.round(n).toLocaleString('en');
export const seconds = ms => ms < 60000 ? `${(ms / 1000).toFixed(1)} s` :
  `${Math.floor(ms / 60000)} min ${Math.round(ms / 1000) % 60} s`;
