-- Chooses the stream server of a request, its home. Requires lease_prelude. The rule is in docs/wire.md, and
-- `server/stream_table.py` has it for Python.

-- Returns the name of a request's home; nil if streams are on the server of the queue.
local home_of
-- Places a request again whose stream server has lost what was placed on it. If the stream may have begun, the record
-- names that server: a worker then ends the request. The caller keeps the record.
local place_again
do
  local open_servers, lost_times

  -- Reads the servers on which streams are placed now, and the times of losses. Rows that cannot be read are ignored.
  local function read_servers()
    if open_servers then return end
    open_servers, lost_times = {}, {}
    local rows = kind_of(STREAM_SERVERS) == 'hash' and redis.call('HGETALL', STREAM_SERVERS) or {}
    local at = now() * 1000
    for i = 1, #rows, 2 do
      local readable, row = pcall(cmsgpack.unpack, rows[i + 1])
      local is_name = #rows[i] <= 32 and string.match(rows[i], '^[a-z0-9-]+$')
      if is_name and readable and type(row) == 'table' and is_finite(row.since) and type(row.id) == 'string' then
        local ends = row['until'] or math.huge -- `until` is a word of Lua
        if row.since <= at and type(ends) == 'number' and at < ends then open_servers[#open_servers + 1] = rows[i] end
        if is_finite(row.lost) then lost_times[rows[i]] = row.lost end
      end
    end
  end

  place_again = function(record)
    if not record.at then return end
    read_servers()
    if (record.placed or record.sorted or 0) / 1000 >= (lost_times[record.at] or 0) then return end
    if (record.grant or 0) > (record.unbegun or 0) then record.lost = record.at end
    record.at = record.request and home_of(record.request)
    record.placed = now() * 1000000
  end

  home_of = function(request)
    local most, home = -1, nil
    read_servers()
    for _, name in ipairs(open_servers) do
      local weight = tonumber(string.sub(redis.sha1hex(name .. '\n' .. request), 1, 13), 16)
      if weight > most or weight == most and name > home then most, home = weight, name end
    end
    return home
  end
end
