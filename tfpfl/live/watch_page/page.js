// Shows how live rounds go. It asks the server that it comes from, once a second while it is looked at, and nobody else.
// Everything that it gets is written as text: names of clients are what somebody chose.

const KEPT = 'tfpfl-operator' // the token, in the storage of this tab
const EVERY = 1000 // milliseconds between two questions
const PAUSES = [1, 2, 4, 8, 15] // seconds between attempts while the server is away; the last one again and again
const PATIENCE = 300 // seconds for which it is asked
const STATES = ['late', 'working', 'sent', 'here', 'away', 'not joined', 'revoked']
const HERE = ['late', 'working', 'sent', 'here']
const OWN = 'local copy' // the model that a client holds after its own work, before the server's step
const WORDS = {
  joined: 'joined',
  revoked: 'was revoked',
  opened: 'began',
  arrived: 'sent its update',
  extended: 'has a later deadline: too few came',
  closed: 'has what it waited for',
  scored: 'sent its scores',
  ended: 'is saved',
  stepped: 'is saved',
}

const $ = (id) => document.getElementById(id)
let token = ''
let state = null // the last answer
let rounds = [] // the rows of all saved rounds
let scored = 0 // the rounds after this one are asked for again: scores may come after a round is saved
let ahead = 0 // seconds by which the server's clock is ahead
let chosen = null // the state of the clients that are shown; null: all
let away = null // {since, tries} while the server does not answer
let over = false // nothing more is asked
let timer = 0

function make(tag, attributes = {}, ...children) {
  const svg = ['svg', 'g', 'line', 'path', 'text', 'circle', 'rect', 'title'].includes(tag)
  const element = svg ? document.createElementNS('http://www.w3.org/2000/svg', tag) : document.createElement(tag)
  for (const [name, value] of Object.entries(attributes)) if (value !== null) element.setAttribute(name, value)
  element.append(...children)
  return element
}

/** Writes a text if it is another one, so that readers of the screen hear changes only. */
function write(element, text) {
  if (element.textContent !== text) element.textContent = text
}

const count = (n, one, many = `${one}s`) => `${n} ${n === 1 ? one : many}`

function bytes(n) {
  for (const unit of ['B', 'kB', 'MB', 'GB']) {
    if (n < 999.5 || unit === 'GB') return `${unit === 'B' || n >= 99.5 ? Math.round(n) : n.toPrecision(2)} ${unit}`
    n /= 1000
  }
}

function duration(seconds) {
  if (seconds < 60) return `${Math.round(seconds)} s`
  if (seconds < 3600) return `${Math.round(seconds / 60)} min`
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} d`
}

const clock = (at) => new Date(at * 1000).toLocaleTimeString(undefined, { hour12: false })
const percent = () => state.run.score.fraction
const score = (value) => (typeof value !== 'number' ? '–' : percent() ? `${(100 * value).toFixed(1)} %` : value.toPrecision(4))
const named = (text) => text.charAt(0).toUpperCase() + text.slice(1)

// ---- asking

class Refused extends Error {}

/** Asks for the rounds after this one. Returns after which one to go on, or null if all are here. */
async function ask(since) {
  const answer = await fetch(`v1/watch?since=${since}`, {
    headers: { Authorization: `Bearer ${token}` },
    cache: 'no-store',
    redirect: 'error',
    signal: AbortSignal.timeout(20_000),
  })
  if (answer.status === 401) throw new Refused('The server refuses this token. The run’s folder has the right one.')
  if (!answer.ok) throw new Error(`the server answered with status ${answer.status}`)
  const found = await answer.json()
  const same = !state || found.run.id === state.run.id
  const next = same ? since + found.history.length : 0
  rounds = same ? rounds.slice(0, since).concat(found.history, rounds.slice(next)) : []
  state = found
  ahead = found.at - Date.now() / 1000
  return (found.history.length || !same) && next < found.saved ? next : null
}

async function step() {
  timer = 0
  try {
    let [since, first] = [Math.min(scored, rounds.length), Infinity]
    while (since !== null) {
      since = await ask(since)
      first = Math.min(first, (state.scoring ?? Infinity) - 1) // of all answers: scores may come between two of them
    }
    scored = first
    away = null
    over = state.doing === 'done'
    say(over ? 'off' : 'on', over ? 'the run is over' : 'live')
    banner('')
    show()
  } catch (error) {
    if (error instanceof Refused) return enter(error.message)
    away ??= { since: Date.now(), tries: 0 }
    const seconds = (Date.now() - away.since) / 1000
    say('away', 'no answer')
    if (state && state.saved >= state.run.rounds) {
      over = true
      say('off', 'the run is over')
      banner('All rounds are saved, and the server has ended. This is its last state.')
    } else if (seconds > PATIENCE) {
      over = true
      banner(`The server has not answered for ${duration(seconds)}.${stale()}`, 'Try again')
    } else {
      banner(`The server does not answer. It is asked again and again.${stale()}`)
    }
  }
  next()
}

const stale = () => (state ? ` What you see is of ${clock(state.at)}.` : '')

function next() {
  clearTimeout(timer)
  timer = 0
  if (over || document.hidden || !token) return
  timer = setTimeout(step, away ? 1000 * PAUSES[Math.min(away.tries++, PAUSES.length - 1)] : EVERY)
}

document.addEventListener('visibilitychange', () => {
  if (!document.hidden && !timer && !over && token) step()
})

function start(given) {
  token = given
  sessionStorage.setItem(KEPT, token)
  away = null
  over = false
  $('enter').hidden = true
  say('off', 'connecting')
  clearTimeout(timer)
  step()
}

function enter(message) {
  clearTimeout(timer)
  timer = 0
  token = ''
  sessionStorage.removeItem(KEPT)
  say('off', 'not connected')
  banner(message)
  $('shown').hidden = true
  $('enter').hidden = false
  $('token').value = ''
  $('token').focus()
}

$('enter').addEventListener('submit', (event) => {
  event.preventDefault()
  const given = $('token').value.trim()
  if (given) start(given)
})

function say(link, text) {
  $('link').dataset.link = link
  write($('link-text'), text)
}

function banner(text, button = '') {
  if ($('banner').firstChild?.textContent === text && !button) return
  $('banner').hidden = !text
  $('banner').replaceChildren(text)
  if (!button) return
  const again = make('button', { type: 'button' }, button)
  again.addEventListener('click', () => start(token))
  $('banner').append(again)
}

// ---- showing

function show() {
  const { run, counts } = state
  $('shown').hidden = false
  $('banner').hidden ||= !$('banner').textContent
  document.title = `${state.saved} of ${run.rounds} · ${run.name}`
  write($('name'), run.name)
  write($('about'), `${run.algorithm} · ${count(run.clients, 'client')} · ${count(run.rounds, 'round')} · ${run.id.slice(0, 8)}`)
  showRound()
  tick()
  showTiles(counts)
  showCharts()
  showClients(counts)
  showEvents()
  showNumbers()
}

function showRound() {
  const { run, round, doing, saved, counts } = state
  const number = round ? round.number : Math.min(saved + (doing === 'done' ? 0 : 1), run.rounds)
  const big = $('now-number')
  if (big.dataset.at !== `${number} ${run.rounds}`) {
    big.dataset.at = `${number} ${run.rounds}`
    big.replaceChildren(String(number), make('small', {}, ` of ${run.rounds}`))
  }
  let text
  if (doing === 'done') text = 'The run is over: all rounds are saved.'
  else if (round && round.deadline === null)
    text = doing === 'score' ? 'All rounds are saved. Clients still score the last model' : 'Devices send updates at their own speed'
  else if (round?.phase) text = `Secure, phase ${round.phase}: ${count(round.waiting.length, 'client')} missing`
  else if (round && doing === 'visit') {
    const have = round.came.length === 1 ? 'has' : 'have'
    text = `${round.came.length} of ${count(round.invited.length, 'update')} ${have} come`
  } else if (round) {
    const score = round.waiting.length === 1 ? 'scores' : 'score'
    text = `All that came is counted. ${count(round.waiting.length, 'client')} still ${score} the new model`
  } else {
    const joined = run.clients - counts['not joined'] - counts.revoked
    text = joined < run.wait_for ? `Waits until ${run.wait_for} clients have joined; ${joined} have` : 'Waits for clients that are awake'
  }
  write($('now-text'), text + (round?.moved ? '. The deadline was moved, because too few had come' : ''))
  const byId = new Map(state.members.map((m) => [m.client, m.state]))
  const shown = round ? (doing === 'visit' ? round.invited : round.waiting) : []
  keep($('now-cells'), shown.slice(0, 60), (client) => client, () => make('li'), (item, client) => {
    const waiting = round.waiting.includes(client)
    const came = round.came.includes(client) // who neither came nor is waited for was revoked, or is out of the attempt
    const what = waiting ? (byId.get(client) === 'late' ? 'late' : 'working') : came ? 'sent' : (byId.get(client) ?? 'away')
    item.dataset.state = what
    item.title = `client ${client}: ${what}`
    write(item, `${client}${what === 'sent' ? ' ✓' : what === 'late' ? ' !' : ''}`)
  })
  $('now-time').hidden = !round || round.deadline === null
  $('all-fill').style.width = `${(100 * saved) / run.rounds}%`
  const seconds = rounds.slice(-10).map((r) => r.seconds).filter((s) => s !== null)
  const mean = seconds.reduce((sum, s) => sum + s, 0) / seconds.length
  const goesOn = doing !== 'done' && seconds.length && saved < run.rounds
  const left = goesOn ? `; the others take about ${duration(mean * (run.rounds - saved))}` : ''
  write($('all-text'), `${saved} of ${run.rounds} rounds are saved${left}`)
}

/** What runs on between two answers: the time that is left. */
function tick() {
  if (!state?.round?.deadline || over) return
  const { began, deadline } = state.round
  const now = Date.now() / 1000 + ahead
  const part = Math.min(Math.max((now - began) / (deadline - began), 0), 1)
  $('now-fill').style.width = `${100 * part}%`
  $('now-fill').classList.toggle('late', state.counts.late > 0)
  write($('now-left'), `${duration(Math.max(deadline - now, 0))} until the deadline at ${clock(deadline)}`)
}
setInterval(tick, 1000)

function showTiles(counts) {
  const here = HERE.reduce((n, name) => n + counts[name], 0)
  const missing = ['away', 'not joined'].filter((name) => counts[name])
  const scored = rounds.findLast((row) => main(row))
  const figure = scored ? score(main(scored).score) : '–'
  const tiles = [
    ['here', `${here} of ${state.run.clients}`, missing.map((name) => `${counts[name]} ${name}`).join(', ')],
    ['late', String(counts.late), counts.late ? `the round waits for ${counts.late === 1 ? 'it' : 'them'}` : 'nobody'],
    [state.run.score.name, figure, scored ? `all clients, round ${scored.round}` : 'no round was scored yet'],
    ['sent in all', bytes(state.bytes.down + state.bytes.up), `${bytes(state.bytes.down)} to devices, ${bytes(state.bytes.up)} from them`],
  ]
  const create = () => make('div', {}, make('dt'), make('dd'), make('dd', { class: 'note' }))
  keep($('tiles'), tiles, ([name]) => name, create, (item, [name, ...texts]) => {
    item.dataset.tone = name === 'late' && counts.late ? 'late' : ''
    for (const [i, text] of [name, ...texts].entries()) write(item.children[i], text)
  })
}

/** The scores of the model that clients predict with, of a row of the history. */
function main(row) {
  const name = Object.keys(row.scores).find((model) => model !== OWN)
  return name === undefined ? null : row.scores[name]
}

function showClients(counts) {
  const names = STATES.filter((name) => counts[name])
  if (chosen && !counts[chosen]) chosen = null
  const buttons = [[null, state.run.clients], ...names.map((name) => [name, counts[name]])]
  keep($('filter'), buttons, ([name]) => name ?? 'all', ([name]) => {
    const button = make('button', { type: 'button' })
    button.addEventListener('click', () => {
      chosen = name
      showClients(state.counts)
    })
    return button
  }, (button, [name, n]) => {
    button.setAttribute('aria-pressed', String(chosen === name))
    write(button, `${name ?? 'all'} ${n}`)
  })
  write($('score-head'), state.run.score.name)
  const rows = state.members.filter((member) => !chosen || member.state === chosen)
  keep($('clients'), rows, (member) => member.client, () => {
    const label = make('th', { scope: 'row' }, make('span'), ' ', make('small'))
    return make('tr', {}, label, make('td', {}, make('span', { class: 'state' })), make('td'), make('td', { class: 'updates' }), make('td'))
  }, (row, member) => {
    const [label, what, heard, updates, scored] = row.children
    write(label.firstChild, String(member.client))
    write(label.lastChild, member.name === String(member.client) ? '' : member.name)
    label.title = member.name
    what.firstChild.dataset.state = member.state
    write(what.firstChild, member.state)
    write(heard, member.heard === null ? '–' : member.heard < 2 ? 'now' : `${duration(member.heard)} ago`)
    write(updates, member.invited ? `${member.came} of ${member.invited}` : '–')
    write(scored, score(member.score))
  })
  write($('left-off'), state.left_off ? `${count(state.left_off, 'more client')} ${state.left_off === 1 ? 'is' : 'are'} not shown.` : '')
}

function showEvents() {
  keep($('events'), [...state.events].reverse().slice(0, 14), (e) => `${e.at} ${e.what} ${e.client}`, (e) => {
    const who = e.client === null ? `Round ${e.round}` : `Client ${e.client}`
    const of = e.client !== null && e.round !== null ? ` of round ${e.round}` : ''
    return make('li', {}, make('time', {}, clock(e.at)), make('span', {}, `${who} ${WORDS[e.what] ?? e.what}${of}`))
  })
}

function showNumbers() {
  if (!$('numbers').open) return
  const what = state.run.score.name
  const heads = ['round', `${what}, all clients`, `${what}, after own work`, 'loss', 'updates', 'missing']
  heads.push('to devices', 'from devices', 'seconds')
  keep($('numbers-head'), heads, (head) => head, (head) => make('th', { scope: 'col' }, head))
  keep($('numbers-rows'), rounds.slice(-500).reverse(), (row) => row.round, (row) => {
    const cells = [score(main(row)?.score), score(row.scores[OWN]?.score), row.loss === null ? '–' : row.loss.toPrecision(4)]
    cells.push(row.clients, row.dropped, bytes(row.bytes_down), bytes(row.bytes_up), row.seconds?.toFixed(2) ?? '–')
    return make('tr', {}, make('th', { scope: 'row' }, String(row.round)), ...cells.map((cell) => make('td', {}, String(cell))))
  })
}
$('numbers').addEventListener('toggle', () => state && showNumbers())

/** Puts one child for each item in order, and keeps those that are there: focus and selection stay. */
function keep(parent, items, key, create, update = () => {}) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]))
  let place = parent.firstChild
  for (const item of items) {
    const name = String(key(item))
    let child = before.get(name)
    before.delete(name)
    if (!child) {
      child = create(item)
      child.dataset.key = name
    }
    update(child, item)
    if (child === place) place = place.nextSibling
    else parent.insertBefore(child, place)
  }
  for (const child of before.values()) child.remove()
}

// ---- curves

const MOST_BARS = 100
const picked = {} // {chart: the round that is pointed at}
const charts = {} // {chart: where its rounds are}

function showCharts() {
  const times = percent() ? 100 : 1
  const unit = percent() ? ' %' : ''
  const of = (pick) => rounds.map((row) => [row.round, pick(row)]).filter(([, y]) => y !== null && y !== undefined)
  const scaled = (found) => (typeof found?.score === 'number' ? times * found.score : null)
  write($('score-title'), named(state.run.score.name) + (percent() ? ' in %' : ''))
  chart('score-chart', unit, percent() ? 1 : 3, [
    { name: 'all clients', points: of((row) => scaled(main(row))) },
    { name: 'after own work', points: of((row) => scaled(row.scores[OWN])) },
  ])
  chart('loss-chart', '', 3, [{ name: 'of the round’s clients', points: of((row) => row.loss) }])
  const recent = rounds.slice(-MOST_BARS)
  write($('came-title'), rounds.length > MOST_BARS ? `Updates of the last ${MOST_BARS} rounds` : 'Updates')
  chart('came-chart', '', 0, [
    { name: 'came', points: recent.map((row) => [row.round, row.clients]) },
    { name: 'missing', points: recent.map((row) => [row.round, row.dropped ?? 0]) },
  ], true)
}

function steps(low, high, most) {
  const raw = (high - low) / most || 1
  const power = 10 ** Math.floor(Math.log10(raw))
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999)
  return { step, low: Math.floor(low / step + 1e-9) * step, high: Math.ceil(high / step - 1e-9) * step }
}

/** Lines over rounds, or with `stacked` two rows of bars, one on top of the other. */
function chart(id, unit, digits, series, stacked = false) {
  const place = $(id)
  const drawn = series.filter((s) => s.points.length)
  const key = JSON.stringify([place.clientWidth, series, picked[id] ?? null])
  if (place.dataset.key === key || !place.clientWidth) return
  place.dataset.key = key
  if (!drawn.length) return place.replaceChildren(make('p', { class: 'empty' }, 'Nothing yet'))

  const [width, height, left, right, top, bottom] = [place.clientWidth, 190, 40, 8, 8, 22]
  const values = (s) => s.points.map(([, value]) => value)
  const ys = stacked ? values(series[0]).map((n, i) => n + values(series[1])[i]) : drawn.flatMap(values)
  const [low, high] = [stacked ? 0 : Math.min(...ys), Math.max(...ys)]
  const scale = steps(low, high > low ? high : high + (stacked ? 1 : Math.abs(high) / 10 || 1), 4)
  if (stacked) scale.step = Math.max(scale.step, 1)
  if (unit) scale.high = Math.min(scale.high, 100)
  const last = rounds.at(-1).round
  const first = stacked ? series[0].points[0][0] - 0.5 : 1
  const span = Math.max(stacked ? last + 0.5 - first : last - first, 1)
  const inner = width - left - right
  const x = (round) => left + (inner * (round - first)) / span
  const y = (value) => height - bottom - ((height - top - bottom) * (value - scale.low)) / (scale.high - scale.low)

  const svg = make('svg', { viewBox: `0 0 ${width} ${height}`, height, role: 'img', 'aria-label': spoken(drawn, unit, digits) })
  for (let value = scale.low; value <= scale.high + scale.step / 1000; value += scale.step) {
    svg.append(make('line', { class: 'grid', x1: left, x2: width - right, y1: y(value), y2: y(value) }))
    svg.append(make('text', { x: left - 6, y: y(value) + 4, 'text-anchor': 'end' }, String(+value.toPrecision(6))))
  }
  const every = Math.max(Math.round(steps(0, span, Math.max(Math.floor(width / 70), 2)).step), 1)
  for (let round = Math.ceil(first / every) * every || 1; round <= last; round += every) {
    svg.append(make('text', { x: x(round), y: height - 4, 'text-anchor': 'middle' }, String(round)))
  }
  const at = picked[id]
  if (at !== undefined) svg.append(make('line', { class: 'grid', x1: x(at), x2: x(at), y1: top, y2: height - bottom }))
  series.forEach((s, k) => {
    const color = ['one', 'two'][k]
    const wide = inner / span - (inner / span > 6 ? 2 : 0)
    if (stacked) {
      for (const [i, [round, n]] of s.points.entries()) {
        const below = k ? series[0].points[i][1] : 0
        const box = { x: x(round) - wide / 2, width: wide, y: y(below + n), height: y(below) - y(below + n) }
        if (n) svg.append(make('rect', { class: `bar ${color}`, ...box }))
      }
    } else if (s.points.length) {
      const points = thinned(s.points, inner).map(([round, value]) => [x(round).toFixed(1), y(value).toFixed(1)])
      svg.append(make('path', { class: `line ${color}`, d: `M${points.map((point) => point.join(' ')).join('L')}` }))
      const marked = s.points.find(([round]) => round === at) ?? s.points.at(-1)
      svg.append(make('circle', { class: `dot ${color}`, cx: x(marked[0]), cy: y(marked[1]), r: 4 }))
    }
  })
  const legend = make('p', { class: 'key' })
  series.forEach((s, k) => {
    const found = at === undefined ? s.points.at(-1) : s.points.find(([round]) => round === at)
    const value = found ? `${found[1].toFixed(digits)}${unit}` : '–'
    if (s.points.length) legend.append(make('span', { class: ['one', 'two'][k] }, `${s.name} `, make('strong', {}, value)))
  })
  legend.append(make('em', {}, `round ${at ?? drawn[0].points.at(-1)[0]}`))
  place.replaceChildren(legend, svg)
  charts[id] = { left, inner, first, span, points: drawn[0].points }
}

/** Shows the values of the round that is pointed at. */
function point(id, clientX) {
  const drawn = charts[id]
  if (!drawn) return
  const part = (clientX - $(id).getBoundingClientRect().left - drawn.left) / drawn.inner
  const near = nearest(drawn.points, drawn.first + part * drawn.span)
  if (picked[id] === near) return
  picked[id] = near
  showCharts()
}
for (const id of ['score-chart', 'loss-chart', 'came-chart']) {
  $(id).addEventListener('pointermove', (event) => point(id, event.clientX))
  $(id).addEventListener('pointerdown', (event) => point(id, event.clientX))
  $(id).addEventListener('pointerleave', () => {
    delete picked[id]
    if (state) showCharts()
  })
}

const nearest = (points, round) => points.reduce((best, [x]) => (Math.abs(x - round) < Math.abs(best - round) ? x : best), points[0][0])

/** At most two points for each pixel: the lowest and the highest of those that fall on it. */
function thinned(points, width) {
  if (points.length <= 2 * width) return points
  const size = points.length / width
  const found = []
  for (let k = 0; k < width; k++) {
    const part = points.slice(Math.floor(k * size), Math.floor((k + 1) * size))
    const low = part.reduce((a, b) => (b[1] < a[1] ? b : a))
    const high = part.reduce((a, b) => (b[1] > a[1] ? b : a))
    found.push(...(low === high ? [low] : [low, high].sort((a, b) => a[0] - b[0])))
  }
  return found
}

function spoken(drawn, unit, digits) {
  const value = ([round, y]) => `${y.toFixed(digits)}${unit} in round ${round}`
  return drawn.map((s) => `${s.name}: from ${value(s.points[0])} to ${value(s.points.at(-1))}`).join('; ')
}

new ResizeObserver(() => state && showCharts()).observe($('shown'))

// ---- the token comes behind '#', which browsers send to nobody; then it goes from the address

function begin() {
  const given = decodeURIComponent(location.hash.slice(1))
  if (given) history.replaceState(null, '', location.pathname)
  const found = given || sessionStorage.getItem(KEPT)
  if (found) start(found)
  else enter('')
}
addEventListener('hashchange', () => location.hash.length > 1 && begin())
begin()
