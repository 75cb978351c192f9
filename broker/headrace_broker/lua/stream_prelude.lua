-- Shared by the stream scripts. An entry is {id, {name, value, ...}}; its id is <attempt>-<tokens after this entry>.

local function field(entry, name)
  for i = 1, #entry[2], 2 do
    if entry[2][i] == name then return entry[2][i + 1] end
  end
end

local function last_entry(key, below)
  return redis.call('XREVRANGE', key, below, '-', 'COUNT', 1)[1]
end

local function split_id(id)
  local attempt, offset = string.match(id, '^(%d+)-(%d+)$')
  return tonumber(attempt), tonumber(offset)
end

-- The last entry (nil where there is no stream), its attempt, and the tokens generated so far by all attempts.
local function tail(key)
  local last = last_entry(key, '+')
  if not last then return nil, 0, 0 end
  local attempt = split_id(last[1])
  -- a start says nothing about tokens: what counts is the last chunk of the attempts before it
  local entry = last
  while entry and field(entry, 'type') == 'start' do
    entry = last_entry(key, '(' .. entry[1])
  end
  if not entry then return last, attempt, 0 end
  local _, offset = split_id(entry[1])
  if field(entry, 'type') == 'end' then offset = offset - 1 end
  return last, attempt, offset
end

-- A stream belongs to the message whose content its first entry names; to any message of the request where that entry
-- names none, as that of a worker of an earlier version, or of a cancellation.
local function is_of_another(key, content)
  local first = redis.call('XRANGE', key, '-', '+', 'COUNT', 1)[1]
  local readable, data = pcall(cmsgpack.unpack, first and field(first, 'data') or '')
  return readable and type(data) == 'table' and type(data.content) == 'string' and data.content ~= content
end

-- No worker counts attempts or tokens so far. An id has 64 bits for each, and Lua counts exactly up to 2^53.
local HIGHEST_COUNT = 1000000000

-- As `tail`, of a stream that can be gone on with. One with ids behind which there is no room for the next is deleted;
-- then the last value is 1.
local function usable_tail(key)
  local last, attempt, tokens = tail(key)
  if attempt < HIGHEST_COUNT and tokens < HIGHEST_COUNT then return last, attempt, tokens, 0 end
  redis.call('DEL', key)
  return nil, 0, 0, 1
end

local function append(key, attempt, offset, kind, data)
  redis.call('XADD', key, string.format('%.0f-%.0f', attempt, offset), 'type', kind, 'data', data)
end
